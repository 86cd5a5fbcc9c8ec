"""The wire: messages, services, and the arithmetic both ends must agree on."""

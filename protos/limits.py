"""Bounds that both ends of the wire hold, and the defaults that go with them."""

MAX_DRAFT_TOKENS = 64  # K of a round
DEFAULT_SUPPORT = 64  # ids of a sparse q row; ARCHITECTURE.md has the table it was chosen from
MAX_SUPPORT = 4096

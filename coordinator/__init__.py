"""Sessions, the decoding loop and the public API. Knows no model and never opens a q row."""

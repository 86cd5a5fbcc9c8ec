"""Models, KV slots, sampling, verification, and the draft and target servers."""

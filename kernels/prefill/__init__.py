"""`chunk_prefill`: several chunks in one pass, each behind the same prefix and blind to the others."""

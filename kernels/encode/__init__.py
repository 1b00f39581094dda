"""`encode_vectors`: K or V as a codec stores it."""

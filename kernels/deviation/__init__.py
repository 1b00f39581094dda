"""`kv_deviation`: how far fresh K and V are from stored ones, per token."""

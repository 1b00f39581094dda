"""The cache as a market: what a block is worth, who uses it, and what leaves first."""

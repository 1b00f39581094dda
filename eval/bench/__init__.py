"""Benchmarks: measured ratios, both sides in one run."""

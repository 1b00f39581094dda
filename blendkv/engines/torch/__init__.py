"""The embedded engine over transformers."""

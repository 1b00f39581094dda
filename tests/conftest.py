"""Fixtures that several folders share: tiny models in folders (tests/support/tiny_hub.py)."""

pytest_plugins = ["tiny_hub"]

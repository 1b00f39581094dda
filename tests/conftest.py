"""Fixtures that several folders share: tiny models in folders (tests/support/tiny_hub.py)."""

from hypothesis import settings

pytest_plugins = ["tiny_hub"]

settings.register_profile("no_deadline", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("no_deadline")

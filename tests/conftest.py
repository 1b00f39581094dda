"""Fixtures that several folders share (tests/support/tiny_hub.py), and a home in which no gate has closed."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from blendkv.config import home

pytest_plugins = ["tiny_hub"]

settings.register_profile("no_deadline", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("no_deadline")


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests a folder of their own in place of the user's, whose quality gate may have closed for a model.

    Converted models and compiled kernels are shared with the user: they take time, and depend on nothing.
    """
    place = Path(tempfile.mkdtemp(prefix="blendkv-tests-"))
    for name in ("models", "kernels"):
        shared = home() / name
        shared.mkdir(parents=True, exist_ok=True)
        (place / name).symlink_to(shared.resolve())
    os.environ["BLENDKV_HOME"] = str(place)
    config.add_cleanup(lambda: shutil.rmtree(place, ignore_errors=True))

"""A user's folder for one test."""

from __future__ import annotations

from pathlib import Path

from blendkv.config import home


def own_home(place: Path) -> Path:
    """Make a home at ``place``, with the models and compiled kernels of the present one: these take minutes to make."""
    place.mkdir(parents=True)
    for name in ("models", "kernels"):
        (place / name).symlink_to((home() / name).resolve())
    return place

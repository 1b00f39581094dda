"""Search indexes as folders beside a collection: named by its tag, written whole or not at all."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from blendkv.errors import StoreError
from blendkv.retrieval.collection import Collection

log = logging.getLogger(__name__)

T = TypeVar("T")

FOLDER = "indexes"

_ABANDONED_SECONDS = 24 * 3600


def open_artifact(
    collection: Collection, kind: str, write: Callable[[Path], None], read: Callable[[Path], T]
) -> tuple[T, str]:
    """Read the index of the collection's present contents, after writing it if there is none.

    Parameters
    ----------
    collection
        Where the contents come from; the index lies in ``indexes/<kind>-<tag>`` beside it.
    kind
        Name of the kind of index and of its settings.
    write
        Fills an empty folder.
    read
        Opens a filled one.

    Returns
    -------
    tuple
        What ``read`` gave, and the collection's tag before it was read.

    Raises
    ------
    StoreError
        If the folder cannot be written.
    """
    tag = collection.tag
    folder = collection.path / FOLDER
    target = folder / f"{kind}-{tag}"
    if target.is_dir():
        try:
            return read(target), tag
        except Exception as error:  # whatever a damaged file makes its library raise
            log.warning("%s cannot be read (%s); it is written again", target, error)
            shutil.rmtree(target, ignore_errors=True)
    _publish(target, write)
    _clean(folder, kind, tag)
    return read(target), tag


def _publish(target: Path, write: Callable[[Path], None]) -> None:
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        try:
            temporary.rename(target)
        except OSError:
            # Another process published the same contents first.
            if not target.is_dir():
                raise
    except OSError as error:
        raise StoreError(f"{target}: cannot be written ({error.strerror}); check the disk and its rights") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _clean(folder: Path, kind: str, tag: str) -> None:
    """Remove this kind's indexes of older contents, and unfinished ones of processes long dead."""
    identity, _, generation = tag.rpartition("-")
    pattern = re.compile(rf"{kind}-([0-9a-f]+)-(\d+)")
    for path in folder.iterdir():
        found = pattern.fullmatch(path.name)
        # A process that has newer contents published them meanwhile: they stay.
        if found and (found[1] != identity or int(found[2]) < int(generation)):
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".{kind}-*.tmp"):
        if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)

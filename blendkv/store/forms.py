"""In what form chunk files lie on the disk: as they are, or in sealed segments.

A store has one form from its beginning. The index remembers the id of the key; the key itself comes from the
environment whenever the store is opened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from blendkv.errors import InputError
from blendkv.store.cells import SCOPE, Cells, PlainCells, SealedCells
from blendkv.store.chunkfile import Header, parse_header
from blendkv.store.filereader import DiskReader, FileReader, SealedReader, adopt_plain, adopt_sealed
from blendkv.store.index import Index, Row
from blendkv.store.seal import KEY_VARIABLE, Sealer
from blendkv.store.segments import Packer
from blendkv.types import TokenIds

_FILE_SCOPE = "disk=1"  # no remote tier's namespace has an "=": its segments do not open here, nor these there
_META = "encryption key"


class Form(Protocol):
    """Writes and opens the files of chunks."""

    suffix: str
    sealed: bool
    cells: Cells
    """The form of the index's own columns."""

    def pack(self, key: str, file: memoryview) -> Sequence[bytes | memoryview]:
        """What is written to disk for a chunk file, piece by piece.

        Raises
        ------
        InputError
            If the file cannot be kept in this form.
        """

    def open(self, path: Path, row: Row) -> FileReader:
        """A reader of the file at ``path``; raises `DamagedChunkError` if it is not that of ``row``."""

    def adopt(self, fd: int, key: str) -> tuple[Header, TokenIds]:
        """Header and token ids of an open file, every byte verified; raises `DamagedChunkError`."""


class PlainForm:
    """The chunk file itself, which any reader of safetensors can open."""

    suffix, sealed = ".safetensors", False

    def __init__(self) -> None:
        self.cells: Cells = PlainCells()

    def pack(self, key: str, file: memoryview) -> Sequence[bytes | memoryview]:
        """The file as it is."""
        return [file]

    def open(self, path: Path, row: Row) -> FileReader:
        """See `Form.open`."""
        return DiskReader(path, row)

    def adopt(self, fd: int, key: str) -> tuple[Header, TokenIds]:
        """See `Form.adopt`."""
        return adopt_plain(fd, key)


class SealedForm:
    """Head and layers, each sealed by itself: a layer is read without the others.

    Parameters
    ----------
    files, index
        Sealers of one key, for the files and for the index.
    """

    suffix, sealed = ".sealed", True

    def __init__(self, files: Sealer, index: Sealer) -> None:
        self.cells: Cells = SealedCells(index)
        self._packer = Packer(None, files)

    def pack(self, key: str, file: memoryview) -> Sequence[bytes | memoryview]:
        """The table of the segments, and the segments."""
        header = parse_header(file, file.nbytes, key)
        if not header.in_order:
            raise InputError(f"chunk KV {key[:12]} was written by a first release and cannot be sealed layer by layer")
        ranges = [header.layer_range(index) for index in range(header.layers)]
        table, segments = self._packer.pack(key, [file[: ranges[0][0]], *(file[start:stop] for start, stop in ranges)])
        return [table.encode(), *segments]

    def open(self, path: Path, row: Row) -> FileReader:
        """See `Form.open`."""
        return SealedReader(path, row, self._packer)

    def adopt(self, fd: int, key: str) -> tuple[Header, TokenIds]:
        """See `Form.adopt`."""
        return adopt_sealed(fd, key, self._packer)


def form_of(root: Path, index: Index, encrypt: bool | None, environ: Mapping[str, str] = os.environ) -> Form:
    """The form of the store at ``root``: the one that it has, for a new one what ``encrypt`` asks for.

    Raises
    ------
    InputError
        If it is encrypted and the key is missing or another one, or is plain and ``encrypt`` is true (or the reverse).
    MissingDependencyError
        If ``cryptography`` is needed and not installed.
    """
    known = index.get_meta(_META)
    if known is None:
        known = _claim(root, index, bool(encrypt), environ)
    if encrypt is not None and encrypt != bool(known):
        how = "encrypted" if known else "not encrypted"
        raise InputError(f"the store at {root} is {how} from its beginning; export its chunks and import them anew")
    if not known:
        return PlainForm()
    form, key_id = _sealed(root, environ)
    if key_id != known:
        raise InputError(
            f"the store at {root} is encrypted with key {known}, {KEY_VARIABLE} holds key {key_id}; set the right one"
        )
    return form


def _claim(root: Path, index: Index, encrypt: bool, environ: Mapping[str, str]) -> str:
    """Decide on the form of a store whose index knows of none: its key's id, or nothing for a plain one."""
    held = index.count()  # written before there was encryption
    foreign = PlainForm.suffix if encrypt else SealedForm.suffix
    if not held and any((root / "kv").glob(f"*/*{foreign}")):
        advice = "leave --encrypt out" if encrypt else "give --encrypt"
        raise InputError(f"the index of {root} is gone, and its files are *{foreign}; {advice} to rebuild it")
    key_id = _sealed(root, environ)[1] if encrypt and not held else ""
    with index.transaction():
        index.set_meta(_META, key_id)
    return key_id


def _sealed(root: Path, environ: Mapping[str, str]) -> tuple[SealedForm, str]:
    """The sealed form with the key in the environment, and that key's id."""
    files, index = Sealer.from_environment(_FILE_SCOPE, environ), Sealer.from_environment(SCOPE, environ)
    if files is None or index is None:
        raise InputError(f"the store at {root} is encrypted and {KEY_VARIABLE} is not set; set it to the store's key")
    return SealedForm(files, index), files.key_id

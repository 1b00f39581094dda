"""Chunk KVs in an object store (S3, GCS, Azure), or in a folder of a shared file system: an object per chunk.

The object is the table, then the segments one behind the other. The first read takes the table and the head; layers
that follow one another are read together by one range. An object appears as a whole; of several writers the last wins,
and a reader who began with another's object is told so by the object's version.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import obstore
from obstore.exceptions import BaseError, PreconditionError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, ObjectStore, S3Store

from blendkv.errors import DamagedChunkError, InputError, StoreFullError, TierUnavailableError
from blendkv.store.remote import Head, Place, checked_key, head_bytes, is_key, parse_head
from blendkv.store.segments import PREFIX_BYTES, Packer, Traffic, length_of

LEAD_BYTES = 64 << 10
"""Bytes of the first read: table and head of a chunk of 1,200 tokens and 32 layers take about 20 KiB."""
_PART_BYTES = 8 << 20  # of a multipart upload; what is smaller is stored in one request
_PARTS_AT_ONCE = 4
_HEADS_AT_ONCE = 32
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|os error (28|122)\b")
_RANGE = re.compile(r"(?i)\brange")
_CLOUDS: dict[str, type[Any]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}


class ObjectTier:
    """Chunk KVs in an object store; see `blendkv.store.remote.RemoteTier`.

    Parameters
    ----------
    name
        The kind of store, ``s3`` for instance.
    stores
        Makes the store at the first call: one for reading and one, more patient, for writing.
    folder
        What the names of the objects begin with.
    packer
        Packs the segments.
    """

    def __init__(
        self, name: str, stores: Callable[[], tuple[ObjectStore, ObjectStore]], folder: str, packer: Packer
    ) -> None:
        self.name = name
        self._make, self._folder, self._packer = stores, folder, packer
        self._stores: tuple[ObjectStore, ObjectStore] | None = None
        self._lock = threading.Lock()

    @classmethod
    def open(cls, place: Place) -> ObjectTier:
        """The tier of an ``s3``, ``gs``, ``az``, ``file`` or ``memory`` URL.

        Raises
        ------
        InputError
            If the URL names no bucket, folder or name.
        """
        url = place.url
        if url.scheme in _CLOUDS:
            if not url.host or url.port is not None:
                raise InputError(f"{url}: give bucket and prefix: {url.scheme}://BUCKET/PREFIX")
            stores = (_cloud(place, place.limits.deadline_s), _cloud(place, place.limits.put_s))
            return cls(url.scheme, lambda: stores, place.folder, place.packer)
        if url.scheme == "file":
            if url.host or not url.path:
                raise InputError(f"{url}: give the folder's absolute path: file:///FOLDER")
            return cls("file", lambda: (_folder(f"/{url.path}"),) * 2, place.folder, place.packer)
        if not url.host or url.path or url.port is not None:
            raise InputError(f"{url}: give a name: memory://NAME")
        return cls("memory", lambda: (_memory(url.host),) * 2, place.folder, place.packer)

    @property
    def traffic(self) -> Traffic:
        """Bytes of segments that were written and read."""
        return self._packer.traffic

    def contains(self, keys: Sequence[str]) -> set[str]:
        """Those of ``keys`` that are there; many are asked for at once."""
        with self._errors() as (store, _):
            there = asyncio.run(_there(store, [self._place(key) for key in keys]))
        return {key for key, known in zip(keys, there, strict=True) if known}

    def head(self, key: str) -> Head | None:
        """The head of the chunk, or None."""
        with self._errors(key) as (store, _):
            try:
                first = obstore.get(store, self._place(key), options={"range": (0, LEAD_BYTES)})
                size, version = first.meta["size"], first.meta["e_tag"]
                leading = memoryview(first.bytes())
            except FileNotFoundError:
                return None
            except BaseError as error:
                if _RANGE.search(str(error)) and _size(store, self._place(key)) == 0:  # no range of nothing
                    raise DamagedChunkError(key, "truncated: 0 bytes") from error
                raise
            if leading.nbytes >= PREFIX_BYTES:
                leading = self._longer(key, leading, length_of(leading, key), size, version)
                leading = self._longer(key, leading, head_bytes(leading, key), size, version)
        head = parse_head(leading, key, self._packer, version)
        if head.table.total != size:
            raise DamagedChunkError(key, f"truncated: {size} of {head.table.total} bytes")
        return head

    def read(self, head: Head, first: int, count: int) -> list[memoryview]:
        """The bytes of ``count`` layers from layer ``first`` on."""
        rows = head.table.segments[first + 1 : first + 1 + count]
        start = rows[0].start
        data = self._range(head.key, start, rows[-1].start + rows[-1].stored, head.version)
        return [
            self._packer.unpack(head.key, head.table, number, data[row.start - start : row.start - start + row.stored])
            for number, row in enumerate(rows, first + 1)
        ]

    def put(self, key: str, head: memoryview, layers: Sequence[memoryview]) -> bool:
        """Store a chunk; False if it is there. What is larger than 8 MiB goes in parts.

        Raises
        ------
        StoreFullError
            If the shared file system is full.
        StoreError
            If it is larger than can be kept.
        """
        if self.contains([key]):
            return False
        table, packed = self._packer.pack(key, [head, *layers])
        parts = [table.encode(), *packed]
        with self._errors(key) as (_, store):
            place = self._place(key)
            try:
                if table.total <= _PART_BYTES:
                    obstore.put(store, place, b"".join(parts), use_multipart=False)
                else:
                    obstore.put(store, place, iter(parts), chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)
            except FileNotFoundError as error:
                raise TierUnavailableError(f"{self.name}: no such bucket, container or folder; create it") from error
        return True

    def delete(self, key: str) -> bool:
        """Forget a chunk; return whether it was there."""
        there = bool(self.contains([key]))
        if there:
            with self._errors(key) as (store, _):
                try:
                    obstore.delete(store, self._place(key))
                except FileNotFoundError:  # somebody else was faster
                    return False
        return there

    def keys(self) -> Iterator[str]:
        """The keys of all chunks."""
        with self._errors() as (store, _):
            for page in obstore.list(store, prefix=self._folder, chunk_size=1000):
                for found in page:
                    key = found["path"].rsplit("/", 1)[-1]
                    if is_key(key) and found["path"] == self._place(key):
                        yield key

    def close(self) -> None:
        """Nothing to do: connections end by themselves."""

    def _place(self, key: str) -> str:
        """Name of a chunk's object; 256 folders, for file systems that are slow with many files in one."""
        return f"{self._folder}/{checked_key(key)[:2]}/{key}"

    def _longer(self, key: str, leading: memoryview, length: int, size: int, version: str | None) -> memoryview:
        """``leading`` with at least ``length`` bytes; what is missing is read."""
        if leading.nbytes >= length:
            return leading
        if length > size:
            raise DamagedChunkError(key, f"truncated: {size} of {length} bytes")
        return memoryview(bytes(leading) + bytes(self._range(key, leading.nbytes, length, version)))

    def _range(self, key: str, start: int, end: int, version: str | None) -> memoryview:
        if start == end:
            return memoryview(b"")
        with self._errors(key) as (store, _):
            try:
                found = obstore.get(store, self._place(key), options={"range": (start, end), "if_match": version})
                return memoryview(found.bytes())
            except (FileNotFoundError, PreconditionError) as error:
                raise DamagedChunkError(key, "missing: deleted or replaced") from error

    @contextmanager
    def _errors(self, key: str = "") -> Iterator[tuple[ObjectStore, ObjectStore]]:
        """The stores for reading and writing; what they raise, in the store's words."""
        try:
            with self._lock:
                if self._stores is None:
                    self._stores = self._make()
                stores = self._stores
            yield stores
        except (BaseError, OSError) as error:
            text = " ".join(str(error).split())[:300]
            if _NO_SPACE.search(str(error)):
                raise StoreFullError(f"no room for chunk KV {key[:12]} in {self.name}: {text}") from error
            raise TierUnavailableError(f"{self.name}: {type(error).__name__}: {text}") from error


async def _there(store: ObjectStore, places: Sequence[str]) -> list[bool]:
    turns = asyncio.Semaphore(_HEADS_AT_ONCE)

    async def one(place: str) -> bool:
        async with turns:
            try:
                await obstore.head_async(store, place)
            except FileNotFoundError:
                return False
            return True

    return await asyncio.gather(*map(one, places))


def _size(store: ObjectStore, place: str) -> int:
    return int(obstore.head(store, place)["size"])


def _cloud(place: Place, seconds: float) -> ObjectStore:
    """A bucket, with credentials and endpoint from the environment; its own retries end within ``seconds``."""
    url, timeout = place.url, timedelta(seconds=seconds)
    plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
    try:
        store: ObjectStore = _CLOUDS[url.scheme](
            url.host,
            prefix=url.path.strip("/") or None,
            client_options={"timeout": timeout, "connect_timeout": timeout, **({"allow_http": True} if plain else {})},
            retry_config={
                "max_retries": 3,
                "retry_timeout": timeout,
                "backoff": {"init_backoff": timedelta(seconds=0.05)},
            },
        )
    except (BaseError, ValueError) as error:
        raise InputError(f"{url} cannot be opened: {' '.join(str(error).split())[:300]}; see docs/remote.md") from error
    return store


def _folder(path: str) -> ObjectStore:
    return LocalStore(path, mkdir=True)


@cache
def _memory(name: str) -> ObjectStore:
    """One store per name and process, so that two tiers can share it."""
    return MemoryStore()

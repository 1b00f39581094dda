"""Remote tiers: chunk KVs that engines on several machines share, in Redis or Valkey or in an object store.

What is stored is the chunk file, in segments (`blendkv.store.segments`). `open_remote` returns a tier by its URL,
behind a guard that keeps deadlines. A new kind of tier is a class with the methods of `RemoteTier` and an entry in
``REMOTE``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from blendkv.errors import InputError, MissingDependencyError
from blendkv.registry import Registry
from blendkv.store.guard import GuardedTier, Limits
from blendkv.store.remote_url import RemoteUrl, parse_url
from blendkv.store.seal import KEY_VARIABLE, Sealer
from blendkv.store.segments import FORMAT, Packer, Table, Traffic

_KEY = re.compile(r"[0-9a-f]{64}")
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(/[A-Za-z0-9][A-Za-z0-9._-]{0,63}){0,7}")
_COMMON_OPTIONS = ("zstd", "encrypt")


@dataclass(frozen=True)
class Head:
    """What stands before layer 0 of a stored chunk, and how large its layers are.

    ``data`` is the beginning of the chunk file (header and token ids), ``layers`` the bytes of every layer in it: they
    add up to the file. ``table`` and ``version`` let the tier find the layers of this very writing of the chunk.
    """

    key: str
    data: memoryview
    table: Table
    version: str | None = None
    layers: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(segment.raw for segment in self.table.segments[1:]))

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole chunk file."""
        return self.data.nbytes + sum(self.layers)


class RemoteTier(Protocol):
    """A remote place of chunk files by key. Safe to call from several threads.

    All calls raise `TierUnavailableError` if the place does not answer. They may take long: callers reach a tier
    through `blendkv.store.guard.GuardedTier`.
    """

    name: str

    @property
    def traffic(self) -> Traffic:
        """Bytes of segments that were written and read."""

    def contains(self, keys: Sequence[str]) -> set[str]:
        """Those of ``keys`` that are there."""

    def head(self, key: str) -> Head | None:
        """The head of the chunk, or None; counts as a use.

        Raises
        ------
        DamagedChunkError
            If it is there and cannot be used.
        StoreMismatchError
            If a newer version of BlendKV wrote it.
        """

    def read(self, head: Head, first: int, count: int) -> list[memoryview]:
        """The bytes of ``count`` layers from layer ``first`` on, in one round trip.

        Raises
        ------
        DamagedChunkError
            If they are gone (its reason begins with ``missing``), cut or altered.
        """

    def put(self, key: str, head: memoryview, layers: Sequence[memoryview]) -> bool:
        """Store a chunk, visible as a whole or not at all; False if it is there already and was left as it is.

        Raises
        ------
        StoreFullError
            If there is no room.
        StoreError
            If it is larger than can be kept.
        """

    def delete(self, key: str) -> bool:
        """Forget a chunk; return whether it was there."""

    def keys(self) -> Iterator[str]:
        """The keys of all chunks; those added or deleted meanwhile may or may not be among them."""

    def close(self) -> None:
        """Close the connections. Idempotent."""


@dataclass(frozen=True)
class Place:
    """What a tier is opened with: its URL, the namespace with the format's version, and how segments are packed."""

    url: RemoteUrl
    folder: str
    packer: Packer
    limits: Limits
    environ: Mapping[str, str]


REMOTE: Registry[Callable[[Place], RemoteTier]] = Registry("remote tier")
"""What opens a tier, by URL scheme."""
_OPTIONS: dict[str, tuple[str, ...]] = {}


def _add(*schemes: str, options: tuple[str, ...] = ()) -> Callable[[Callable[[Place], RemoteTier]], None]:
    def register(opener: Callable[[Place], RemoteTier]) -> None:
        for scheme in schemes:
            REMOTE.add(scheme)(opener)
            _OPTIONS[scheme] = options

    return register


@_add("redis", "rediss", "unix", options=("ttl", "db", "cluster"))
def _redis(place: Place) -> RemoteTier:
    from blendkv.store.redis import RedisTier

    return RedisTier.open(place)


@_add("s3", "gs", "az", "file", "memory")
def _objects(place: Place) -> RemoteTier:
    from blendkv.store.objects import ObjectTier

    return ObjectTier.open(place)


def open_remote(
    url: str, *, namespace: str = "default", limits: Limits | None = None, environ: Mapping[str, str] = os.environ
) -> GuardedTier:
    """Open a remote tier. Nothing is sent yet: a tier that is down now may be up later.

    Parameters
    ----------
    url
        ``redis://HOST[:PORT]``, ``rediss://HOST[:PORT]`` (TLS) or ``unix:///SOCKET``, with ``?ttl=SECONDS`` (a week by
        default), ``db=N`` or ``cluster=1``; ``s3://BUCKET[/PREFIX]``, ``gs://BUCKET[/PREFIX]``,
        ``az://CONTAINER[/PREFIX]``, ``file:///FOLDER`` (a shared file system) or ``memory://NAME`` (in this process).
        All take ``zstd=LEVEL`` to compress, and ``encrypt=1`` or ``0``: by default chunks are encrypted if there is a
        key.
    namespace
        Whose chunks these are: ``tenant`` or ``tenant/model``. Chunks of other namespaces are neither seen nor touched.
    limits
        Deadlines and what opens the circuit.
    environ
        Where credentials come from: ``BLENDKV_REDIS_USERNAME`` and ``BLENDKV_REDIS_PASSWORD``; what the providers'
        own tools read (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ...) always comes from the process's environment;
        ``BLENDKV_ENCRYPTION_KEY``.

    Raises
    ------
    InputError
        If the URL, an option, the namespace or the encryption key cannot be used.
    MissingDependencyError
        If the tier's client is not installed.
    """
    parsed = parse_url(url)
    if parsed.scheme not in REMOTE.names():
        raise InputError(f"{parsed} is no remote tier; allowed: {', '.join(f'{s}://' for s in REMOTE.names())}")
    parsed.check_options(*_COMMON_OPTIONS, *_OPTIONS[parsed.scheme])
    if not _NAMESPACE.fullmatch(namespace):
        raise InputError(f"namespace {namespace!r}: give parts of letters, digits, '.', '_' and '-', '/' between them")
    limits = limits or Limits()
    sealer = _sealer(parsed, f"{namespace} {FORMAT}", environ)
    # Chunks sealed with another key, or with none, are elsewhere, and so not there rather than damaged. No namespace
    # has an "=", so that none is a folder of another's chunks.
    folder = f"blendkv-{FORMAT}/{namespace}/chunks={'plain' if sealer is None else sealer.key_id}"
    packer = Packer(parsed.number("zstd", 1, 19), sealer)
    try:
        inner = REMOTE.get(parsed.scheme)(Place(parsed, folder, packer, limits, environ))
    except ImportError as error:
        raise MissingDependencyError(f"{parsed} needs {error.name!r}; run: pip install 'blendkv[remote]'") from error
    return GuardedTier(inner, limits)


def _sealer(url: RemoteUrl, scope: str, environ: Mapping[str, str]) -> Sealer | None:
    wanted = url.number("encrypt", 0, 1)
    if wanted == 0:
        return None
    sealer = Sealer.from_environment(scope, environ)
    if wanted and sealer is None:
        raise InputError(f"{url} asks for encryption and {KEY_VARIABLE} is not set; set it to 32 bytes in base64")
    return sealer


def is_key(text: str) -> bool:
    """Whether ``text`` can be a chunk key: 64 hex digits."""
    return _KEY.fullmatch(text) is not None


def checked_key(key: str) -> str:
    """Return ``key`` if it is one: names in a remote place are made of keys.

    Raises
    ------
    InputError
        If it is not 64 hex digits.
    """
    if not is_key(key):
        raise InputError(f"{key[:80]!r} is no chunk key; keys are 64 hex digits")
    return key


def head_bytes(leading: bytes | memoryview, key: str) -> int:
    """Bytes of table and head that begin with ``leading``, which holds the whole table.

    Raises
    ------
    DamagedChunkError, StoreMismatchError
        As `Table.parse`.
    """
    table = Table.parse(leading, key)
    return table.segments[1].start


def parse_head(leading: memoryview, key: str, packer: Packer, version: str | None = None) -> Head:
    """The head at the beginning of ``leading``.

    Raises
    ------
    DamagedChunkError
        If it is cut or altered, or cannot be unsealed.
    StoreMismatchError
        If a newer version of BlendKV wrote it.
    """
    table = Table.parse(leading, key)
    first = table.segments[0]
    data = packer.unpack(key, table, 0, leading[first.start : first.start + first.stored])
    return Head(key, data, table, version)

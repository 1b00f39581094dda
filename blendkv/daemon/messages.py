"""What clients and the daemon say to one another. Keys are the 32 bytes of a chunk key.

Every request has one reply, of the type named in its docstring or `Fault`.
``workload`` and ``session`` say whose work a request is (`blendkv.market.base.Use`); empty: nobody has said so.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from blendkv.market.base import LONGEST_WORD
from blendkv.market.hints import Hint as Saying
from blendkv.market.words import LONGEST_TTL
from blendkv.store.pricing import MOST_PRICES
from blendkv.store.reports import ChunkInfo, GcReport, MarketReport, RepairReport, StoreStat, VerifyReport

PROTOCOL = 4
"""Raised with every change that an older peer would misread."""
MOST_KEYS = 4096
"""Keys in one message."""
MOST_BUFFER = 256 << 20
"""Bytes of a connection's put buffer."""

Key: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Keys: TypeAlias = Annotated[list[Key], msgspec.Meta(max_length=MOST_KEYS)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]
Word: TypeAlias = Annotated[str, msgspec.Meta(max_length=LONGEST_WORD)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_TTL)]
Tag: TypeAlias = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")]
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Message(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """Anything that is sent."""


class Hello(Message):
    """First on a connection. Reply: `Welcome`, with the descriptor of the daemon's arena."""

    protocol: int
    client: Text
    pid: int


class Ping(Message):
    """Are you there? Reply: `Done`."""


class Lookup(Message):
    """Which are stored? Reply: `Digests`."""

    keys: Keys


class TokenIdsOf(Message):
    """The token ids of a chunk. Reply: `Blob`, int32 little-endian; empty if it is not stored."""

    key: Key


class Get(Message):
    """Lend me chunks. Replies, in any order: for each `Lent`, `Direct` or `Missing`.

    The first is answered under the number of the request, the next under the number after it, and so on.
    """

    keys: Keys
    workload: Word = ""
    session: Word = ""


class Await(Message):
    """Wait for a layer of a chunk that is being loaded. Reply: `Done`, or `Lost`."""

    loan: Natural
    layer: Natural


class Release(Message):
    """Loans that are over. No reply."""

    loans: list[Natural]


class Put(Message):
    """Keep the chunk file in the sealed memory whose descriptor comes along. Reply: `Done`, when it is on disk."""

    key: Key
    workload: Word = ""
    session: Word = ""


class PutBuffer(Message):
    """Puts come in the memory whose descriptor comes along, in place of what was so before. Reply: `Done`."""


class PutFrom(Message):
    """Keep the chunk file in the first ``size`` bytes of the put buffer. Reply: `Done`, when it is on disk.

    The buffer must not change until then: what was altered meanwhile is refused.
    """

    key: Key
    size: Natural
    workload: Word = ""
    session: Word = ""


class Prefetch(Message):
    """Bring chunks to memory; a higher ``priority`` goes first. Reply: `Number`, of those that are or come."""

    keys: Keys
    priority: int
    workload: Word = ""
    session: Word = ""


class Earns(Message):
    """Is a chunk worth its ``nbytes`` in a store that may be full? Reply: `Number`, 1 if it is."""

    key: Key
    tokens: Natural
    nbytes: Natural
    tenant: Tag
    workload: Word = ""
    session: Word = ""


class Hint(Message):
    """What a session says of itself. Reply: `Number`, 1 if a policy listens."""

    session: Word
    what: Saying
    ttl: Seconds


class Cancel(Message):
    """Forget prefetches that have not begun. Reply: `Number`, of those forgotten."""

    keys: Keys


class Discard(Message):
    """A chunk is damaged. Reply: `Done`."""

    key: Key
    reason: Text


class Remove(Message):
    """Drop a chunk. Reply: `Number`, 1 if it was there."""

    key: Key


class Pin(Message):
    """Pin or unpin. Reply: `Done`."""

    keys: Keys
    pinned: bool


class List(Message):
    """All chunks. Reply: `Listing`."""


class Stat(Message):
    """Reply: `Stats`."""


class Market(Message):
    """The chunks that would leave memory first. Reply: `Marketed`."""

    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_PRICES)]


class Verify(Message):
    """Read every file. Reply: `Verified`."""


class Collect(Message):
    """Evict down to the limits and sweep. Reply: `Collected`."""


class DropPageCache(Message):
    """For benchmarks. Reply: `Done`."""


class IndexVersion(Message):
    """Reply: `Number`."""


class IndexCount(Message):
    """Chunks of all, or of a tenant. Reply: `Number`."""

    tenant: Tag | None = None


class IndexKeys(Message):
    """Reply: `Blob`, the keys one behind the other, of all chunks or of a tenant's."""

    tenant: Tag | None = None


class IndexChanged(Message):
    """Chunks added or used after a tick, all or a tenant's. Reply: `Changes`."""

    tick: Natural
    tenant: Tag | None = None


class IndexEntries(Message):
    """What the index knows of chunks. Reply: `Entries`."""

    keys: Keys


class Welcome(Message):
    """``path`` is the store's folder, ``repair`` what opening it put right."""

    protocol: int
    version: Text
    path: str
    repair: RepairReport


class Done(Message):
    """It is so."""


class Missing(Message):
    """There is no such chunk."""


class Lent(Message):
    """The chunk's file lies at ``offset`` of the arena.

    ``ready`` layers are there already; the last word of the slab tells of further ones, and `Await` waits for them.
    ``tier`` is where they came from. The loan keeps the chunk in memory until `Release`, or the end of the connection.
    """

    loan: Natural
    ready: Natural
    tier: Text
    offset: Natural
    size: Natural


class Direct(Message):
    """There is no room for the chunk in memory: the descriptor that comes along is a file's of its own.

    ``loan`` is to be released when it is closed; 0: nobody waits for that.
    """

    loan: Natural


class Number(Message):
    """A count."""

    value: int


class Blob(Message):
    """Bytes."""

    data: bytes


class Digests(Message):
    """BLAKE2b-128 of the token ids of each chunk asked for, empty where there is none; and which are in memory."""

    digests: list[bytes]
    in_memory: list[bool]


class Listing(Message):
    """Least recently used first."""

    chunks: list[ChunkInfo]


class Stats(Message):
    """The store's, and the daemon's own: loans, clients, loads that wait, bytes of shared memory that nothing uses.

    ``policy`` is the name of the memory's; ``strange`` counts requests whose workload class was one too many, and is
    taken as unknown.
    """

    store: StoreStat
    loans: int
    clients: int
    loading: int
    free_bytes: int
    policy: str
    strange: int


class Marketed(Message):
    """The price list."""

    report: MarketReport


class Verified(Message):
    """What a verification found."""

    report: VerifyReport


class Collected(Message):
    """What a clean-up did."""

    report: GcReport


class Changes(Message):
    """(key, bytes of the file, tick), oldest first."""

    rows: list[tuple[bytes, int, int]]


class Entry(Message):
    """``recipe`` as JSON, ``token_ids`` as int32 little-endian."""

    key: bytes
    fingerprint: str
    recipe: str
    token_ids: bytes


class Entries(Message):
    """Of the chunks that are there, in no order."""

    entries: list[Entry]


class Fault(Message):
    """The request failed; ``kind`` names the error's class in `blendkv.errors`."""

    kind: Text
    message: str


class Lost(Message):
    """That layer will not come, nor any after it."""

    reason: str


Tagged: TypeAlias = Get | Put | PutFrom | Prefetch | Earns
"""Requests that say whose work they are."""
Request: TypeAlias = (
    Hello | Ping | Lookup | TokenIdsOf | Tagged | Await | Release | PutBuffer | Cancel | Hint | Discard
    | Remove | Pin | List | Stat | Market | Verify | Collect | DropPageCache | IndexVersion | IndexCount | IndexKeys
    | IndexChanged | IndexEntries
)  # fmt: skip
Reply: TypeAlias = (
    Welcome | Done | Missing | Lent | Direct | Number | Blob | Digests | Listing | Stats | Marketed | Verified
    | Collected | Changes | Entries | Fault | Lost
)  # fmt: skip

REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

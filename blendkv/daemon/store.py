"""The daemon's store: the tiers of `blendkv.store`, with chunk files in shared memory as what memory holds."""

from __future__ import annotations

import logging
import resource
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blendkv.daemon.arena import Arena, Slab, held_bytes
from blendkv.daemon.aside import LEAST_ROOM, Aside, Asides
from blendkv.daemon.images import Image, head_of, refused
from blendkv.daemon.loader import IDLE, URGENT, Load, Loader
from blendkv.daemon.shm import Parcel
from blendkv.errors import BlendKVError, DamagedChunkError, StoreFullError
from blendkv.market.base import USUAL
from blendkv.market.policy import Standing
from blendkv.market.worth import Worth
from blendkv.store.chunkfile import copy_bytes, parse_header
from blendkv.store.core import TieredStore
from blendkv.store.filereader import DiskReader, FileReader
from blendkv.store.guard import GuardedTier
from blendkv.store.index import Index
from blendkv.store.memory import MemoryTier
from blendkv.store.opening import open_disk
from blendkv.store.policy import tier_policy
from blendkv.store.quotas import Quotas
from blendkv.store.remote_reader import RemoteReader
from blendkv.store.remotes import Remotes

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lending:
    """A chunk in use: its image, and the tier it came from."""

    image: Image
    tier: str


class ImageStore(TieredStore[Image]):
    """Chunk files by key: in shared memory up to ``memory_bytes``, then on disk.

    What is lent stays in memory until it is given back; what is loaded is there from the first moment on, filled layer
    by layer, so that several clients share one load.

    Parameters
    ----------
    root
        The store's folder.
    memory_bytes, disk_bytes
        Limits in bytes; no disk limit by default.
    policy
        Name of the memory's eviction policy (`blendkv.market.policies`). With ``market`` it ranks what leaves the disk
        as well (`blendkv.store.hand`), and has a say in what is prefetched or put; else the disk gives up what was used
        longest ago: a policy of its own would hold every key in this process, half a gigabyte for a million.
    remotes
        Remote tiers, fastest first; closed with the store.
    quotas
        Bytes that each tenant may have in memory, and on disk.
    encrypt
        Whether what is on disk is encrypted; by default as the store is.
    prefill_rate
        Tokens per second that engines prefill; see `blendkv.store.KVStore.open`.

    Raises
    ------
    InputError, StoreMismatchError, StoreError
        As `blendkv.store.KVStore.open`.
    """

    def __init__(
        self,
        root: Path,
        memory_bytes: int,
        disk_bytes: int | None = None,
        policy: str = USUAL,
        remotes: Sequence[GuardedTier] = (),
        quotas: Quotas | None = None,
        encrypt: bool | None = None,
        prefill_rate: float | None = None,
    ) -> None:
        worth = Worth.at(prefill_rate)
        disk, repair = open_disk(root, disk_bytes, None, Image.file, quotas, encrypt)
        self.arena = Arena(memory_bytes)
        super().__init__(
            MemoryTier(self.arena.size, tier_policy(policy, self.arena.size), _held, quotas, worth),
            disk,
            repair,
            Remotes(remotes, Image.file) if remotes else None,
            quotas,
        )
        self._files = disk
        self._loader = Loader()
        self._asides = Asides(max(LEAST_ROOM, self.arena.size // 4))
        self._told_full = False

    @property
    def index(self) -> Index:
        """The index of the disk."""
        self._check_open()
        return self._files.index

    @property
    def loading(self) -> int:
        """Chunks on their way to memory."""
        return self._loader.pending

    def lend(self, key: str) -> Lending | Aside | DiskReader | None:
        """Lend the chunk; give it back with `take_back`.

        Without room in memory a reader of its file, which is nobody's to give back; where a client cannot read that,
        the chunk in memory of its own.
        """
        lending = self.lend_from_memory(key)
        if lending is None:
            self._count("memory misses")
        return lending or self._load(key, URGENT, lend=True)

    def lend_from_memory(self, key: str) -> Lending | None:
        """Lend the chunk if it is in memory, or on its way there; never waits."""
        self._check_open()
        with self._timings.timed("memory get"):
            image = self._memory.use(key)
        if image is None:
            return None
        self._count("memory hits")
        if not image.whole:
            self._loader.hasten(key, URGENT)
        self._files.index.touch(key)
        return Lending(image, "memory")

    def take_back(self, loan: Lending | Aside) -> None:
        """A loan is over."""
        if isinstance(loan, Aside):
            self._asides.back(loan)
        else:
            self._memory.release(loan.image.key)

    def receive(self, key: str, sent: memoryview) -> Image:
        """A copy of the chunk file that a client has ``sent``, in memory if it is let in; every byte is checked.

        What was sent may change meanwhile: it is copied first, and the copy is checked.

        Raises
        ------
        InputError
            If it is not a whole chunk file of that key.
        """
        self._check_open()
        place: Slab | Parcel | None = None
        let_in = True
        if not self._memory.contains(key):
            with refused(key), suppress(StoreFullError):  # which shows, and is counted, when it is put
                header = parse_header(head_of(sent, sent.nbytes, key), sent.nbytes, key)
                tenant, tokens = header.recipe.tenant, header.tensors["token_ids"].shape[0]
                let_in = self._memory.admits(key, tokens, held_bytes(sent.nbytes), tenant)
                place = self._room(sent.nbytes, tenant) if let_in else None
        if place is None:
            parcel = place = Parcel.create(sent.nbytes)
            with parcel.writable() as file:
                copy_bytes(file, sent)
        else:
            copy_bytes(place.view(), sent)
        image = Image.received(key, place)
        image.turned_away = not let_in
        return image

    def prefetch(self, keys: Sequence[str], priority: int) -> int:
        """Bring chunks to memory in the background; return how many are there or come.

        One that is not worth what would leave for it is not brought: nobody waits for it yet.
        """
        self._check_open()
        return sum(self.in_memory(key) or self._load(key, priority, lend=False) is not None for key in keys)

    def warm(self, key: str) -> bool:
        """Bring a chunk from disk to memory if nothing has to leave for it; return whether it comes.

        The disk does not take it for a use.
        """
        self._check_open()
        if self._memory.contains(key):
            return False
        try:
            reader = self._files.open(key)
        except DamagedChunkError as error:
            self._damaged(error)
            return False
        if reader is None:
            return False
        size = reader.header.file_bytes
        slab = self.arena.allocate(size) if self._memory.spare(held_bytes(size), reader.recipe.tenant) else None
        if slab is None:
            reader.close()
            return False
        lending = self._begin(reader, slab, IDLE)
        if lending is not None:
            self.take_back(lending)
        return lending is not None

    def ranked(self, count: int) -> list[Standing] | None:
        """The ``count`` dearest chunks in memory, the dearest first; None if its policy keeps no prices."""
        return self._memory.ranked(count)

    def cancel(self, keys: Sequence[str]) -> int:
        """Forget loads that have not begun and that nobody waits for; return how many."""
        return sum(not self._memory.in_use(key) and self._loader.cancel(key) for key in keys)

    def close(self) -> None:
        """End the loads, write what waits, then close."""
        self._loader.close()
        super().close()

    def _checked(self, kv: Image) -> Image:
        return kv

    def _let_in(self, kv: Image) -> bool:
        if kv.turned_away or isinstance(kv.place, Slab):  # `receive` has asked for it
            return not kv.turned_away
        return super()._let_in(kv)

    def _size(self, kv: Image) -> int:
        return held_bytes(kv.header.file_bytes)

    def _hold(self, kv: Image) -> Image:
        """Copy what a client has sent into the arena; `StoreFullError` if there is no room."""
        held = self._memory.get(kv.key)
        if held is None:
            there = isinstance(kv.place, Slab)
            moved = kv if there else kv.moved(self._room(kv.header.file_bytes, kv.recipe.tenant))
            held = self._memory.place(moved)
        return held if held.whole else kv  # one that is still being filled must not be written to disk

    def _room(self, size: int, tenant: str) -> Slab:
        """A slab, with the chunks evicted that it takes; gaps may ask for more of them than their bytes do.

        The tenant's own go first, as far as its quota asks for it: a tenant over its quota evicts nobody else's.
        """
        self._memory.keep_quota(tenant, held_bytes(size))
        while (slab := self.arena.allocate(size)) is None:
            if size > self.arena.size or not self._memory.evict(size):
                raise StoreFullError(
                    f"a chunk KV of {size} bytes does not fit in memory: the limit is {self.arena.size} bytes, and "
                    "what is there is pinned, in use or on its way; raise the limit or unpin some"
                )
        return slab

    def _load(self, key: str, priority: int, *, lend: bool) -> Lending | Aside | DiskReader | None:
        reader = self._open(key)
        if reader is None:
            return None
        if not lend and not self._worth_bringing(reader):
            reader.close()
            return None
        try:
            slab = self._room(reader.header.file_bytes, reader.recipe.tenant)
        except StoreFullError:
            self._count("not in memory")
            if not lend:
                reader.close()
                return None
            return reader if isinstance(reader, DiskReader) else self._read_aside(reader)
        lending = self._begin(reader, slab, priority)
        if lending is not None and not lend:
            self.take_back(lending)
        return lending

    def _begin(self, reader: FileReader | RemoteReader, slab: Slab, priority: int) -> Lending | None:
        """Have the chunk loaded into ``slab``, and lend it; None if it turns out damaged."""
        key = reader.key
        try:
            reader.fill_head(slab.view())
        except DamagedChunkError as error:
            self._damaged(error)
            return None
        image = Image(key, reader.header, reader.token_ids, slab, 0)
        held = self._memory.hold(image)
        lending = Lending(held, reader.tier)
        if held is image:
            if isinstance(reader, RemoteReader):  # whose calls are timed where they are made
                load = Load(image, reader, self._come)
            else:
                load = Load(image, reader, self._loaded, partial(self._timings.add, "disk load"))
            self._loader.submit(load, priority)
        else:
            reader.close()  # another client was faster
        return lending

    def _read_aside(self, reader: FileReader | RemoteReader) -> Aside | None:
        """The chunk in memory of its own: what is sealed, or far away, only the daemon can read."""
        try:
            aside = self._asides.read(reader)
        except BlendKVError as error:
            if isinstance(reader, FileReader) and isinstance(error, DamagedChunkError):
                self._damaged(error)
            else:
                self._count("failed loads")
            return None
        if aside is None:
            self._count("failed loads")
            if not self._told_full:
                self._told_full = True
                _log.warning(
                    "chunk KVs find no room in memory nor beside it, and are missed; raise --memory (said once)"
                )
        elif isinstance(reader, RemoteReader):
            self._keep_remote(Image(reader.key, reader.header, reader.token_ids, aside.parcel, reader.layers))
        return aside

    def _worth_bringing(self, reader: FileReader | RemoteReader) -> bool:
        size = held_bytes(reader.header.file_bytes)
        return self._memory.admits(reader.key, len(reader.token_ids), size, reader.recipe.tenant)

    def _open(self, key: str) -> FileReader | RemoteReader | None:
        try:
            with self._timings.timed("disk get"):
                reader = self._files.get(key)
        except DamagedChunkError as error:
            self._damaged(error)
            reader = None
        self._count("disk misses" if reader is None else "disk hits")
        return reader or self._from_remote(key)

    def _come(self, image: Image, error: BlendKVError | None) -> None:
        """A load from a remote tier has ended; the disk knows nothing of it, nor of its damage."""
        if error is None:
            self._keep_remote(image)
        else:
            self._memory.delete(image.key)
            self._count("failed loads")

    def _loaded(self, image: Image, error: BlendKVError | None) -> None:
        if error is None:
            self._count("promoted")
            with self._moving:
                if not self._closed and not self._files.contains(image.key):  # removed while it was read
                    self._memory.delete(image.key)
            return
        self._memory.delete(image.key)
        if isinstance(error, DamagedChunkError) and not error.reason.startswith("cancelled"):
            self._damaged(error)
        elif not isinstance(error, DamagedChunkError):
            self._count("failed loads")


def _held(image: Image) -> int:
    return image.place.held if isinstance(image.place, Slab) else 0


def raise_file_limit() -> int:
    """Let this process open as many files as it may (a chunk that is loaded is one); return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard

"""One client of the daemon: its requests, its loans."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from blendkv import __version__
from blendkv.daemon import messages as m
from blendkv.daemon.arena import Slab
from blendkv.daemon.aside import Aside
from blendkv.daemon.images import Image
from blendkv.daemon.shm import Buffer, Parcel
from blendkv.daemon.store import ImageStore, Lending
from blendkv.daemon.uses import acting
from blendkv.daemon.wire import NUMBERS, Wire, WireError, close_all
from blendkv.errors import BlendKVError, InputError, StoreError
from blendkv.market.base import NOBODY, Use
from blendkv.store.chunkfile import recipe_to_json, token_ids_digest

if TYPE_CHECKING:
    from blendkv.daemon.server import Daemon

_log = logging.getLogger(__name__)

Answer = m.Reply | tuple[m.Reply, int] | None
_KINDS = ("InputError", "StoreMismatchError", "StoreFullError", "StoreError")


class _OwnedFd:
    """A descriptor that is closed with the object unless it was taken: a request may never be served."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._closer = weakref.finalize(self, os.close, fd)

    def take(self) -> int:
        """The descriptor, the caller's from now on."""
        self._closer.detach()
        return self._fd


class Session:
    """Reads the requests of one connection until it ends; then all its loans are over.

    What may take long is done by ``pool``, puts by ``writers``, so that they hold up nothing that is quick.
    """

    def __init__(
        self,
        daemon: Daemon,
        store: ImageStore,
        wire: Wire[m.Request],
        pool: ThreadPoolExecutor,
        writers: ThreadPoolExecutor,
    ) -> None:
        self._daemon = daemon
        self._store = store
        self._wire = wire
        self._pool = pool
        self._writers = writers
        self._loans: dict[int, Lending | Aside] = {}
        self._next = 1
        self._buffer: Buffer | None = None
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._closed = self._over = False
        self.client = "?"

    @property
    def loans(self) -> int:
        """Chunks that the client uses."""
        return len(self._loans)

    def run(self) -> None:
        """Serve until the connection ends."""
        try:
            number, hello, fds = self._wire.receive()
            close_all(fds)
            self._welcome(number, hello)
            while not self._closed:
                self._serve(*self._wire.receive())
        except WireError as error:
            _log.info("client %s: %s", self.client, error)
        except RuntimeError:
            if not self._closed:  # the pools take nothing more then
                raise
        finally:
            with self._sending:
                self._wire.close()
            with self._lock:
                self._over = True
            if not self._closed:  # else the memory stays as it is: clients may read it longer than the daemon lives
                self._end_loans(list(self._loans))

    def close(self) -> None:
        """End the connection, because the daemon ends."""
        self._closed = True
        self._wire.end()

    def _welcome(self, number: int, hello: m.Request) -> None:
        if not isinstance(hello, m.Hello):
            raise WireError("it did not say hello")
        if hello.protocol != m.PROTOCOL:
            message = (
                f"the client speaks protocol {hello.protocol}, the daemon {m.PROTOCOL}; use one version of blendkv"
            )
            self._send(number, m.Fault("StoreMismatchError", message))
            raise WireError(message)
        self.client = f"{hello.client} ({hello.pid})"
        store, fd = self._store, self._store.arena.reader_fd()
        try:
            self._send(number, m.Welcome(m.PROTOCOL, __version__, str(store.path), store.repair), (fd,))
        finally:
            os.close(fd)

    def _serve(self, number: int, request: m.Request, fds: list[int]) -> None:
        use = self._daemon.uses.of(request)
        if isinstance(request, m.Put):
            if len(fds) != 1:
                close_all(fds)
                raise WireError("a put has no descriptor")
            owned = _OwnedFd(fds[0])
            self._writers.submit(self._answer, number, lambda: self._put(request, owned), use)
            return
        if isinstance(request, m.PutBuffer):
            if len(fds) != 1:
                close_all(fds)
                raise WireError("a put buffer has no descriptor")
            self._answer(number, lambda: self._take_buffer(fds[0]))
            return
        close_all(fds)
        if isinstance(request, m.PutFrom):
            buffer = self._buffer  # the one that there is now, whatever comes while the put waits
            self._writers.submit(self._answer, number, lambda: self._put_from(request, buffer), use)
            return
        if isinstance(request, m.Get):
            self._serve_gets(number, request, use)
            return
        quick = _QUICK.get(type(request))
        if self._store.asks_remotes and isinstance(request, m.Lookup | m.TokenIdsOf):
            quick = None
        if quick is not None:
            self._answer(number, lambda: quick(self, request))
            return
        if isinstance(request, m.Await):
            self._answer(number, lambda: self._await(number, request))
            return
        slow = _SLOW.get(type(request))
        if slow is None:
            raise WireError(f"{type(request).__name__} has no place here")
        self._pool.submit(self._answer, number, lambda: slow(self, request), use)

    def _serve_gets(self, first: int, request: m.Get, use: Use) -> None:
        """What is not in memory may take a while, and neither pings nor other chunks must wait for it."""
        if first + len(request.keys) > NUMBERS:
            raise WireError(f"the replies to a request numbered {first} have no numbers")
        for number, key in enumerate(map(bytes.hex, request.keys), first):
            with acting(use):
                lent = self._store.lend_from_memory(key)
            if lent is not None:
                self._answer(number, partial(self._lend, number, lent))
            else:
                self._pool.submit(self._answer, number, partial(self._get, number, key), use)

    def _answer(self, number: int, work: Callable[[], Answer], use: Use = NOBODY) -> None:
        """Do the work, for ``use``, and send its result, or its fault."""
        try:
            with acting(use):
                answer = work()
        except WireError:
            self._cut_off()
            return
        except BlendKVError as error:
            kind = next((kind for kind in type(error).__mro__ if kind.__name__ in _KINDS), StoreError)
            answer = m.Fault(kind.__name__, str(error))
        except Exception as error:
            _log.exception("a request failed in an unforeseen way")
            answer = m.Fault("StoreError", f"the daemon failed: {type(error).__name__}: {error}")
        if answer is None:
            return
        reply, fd = answer if isinstance(answer, tuple) else (answer, None)
        try:
            self._send(number, reply, () if fd is None else (fd,))
        except WireError:
            self._cut_off()
        finally:
            if fd is not None:
                os.close(fd)

    def _send(self, number: int, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        with self._sending:
            self._wire.send(number, message, fds)

    def _put(self, request: m.Put, fd: _OwnedFd) -> Answer:
        self._store.put(Image.received(request.key.hex(), Parcel.received(fd.take())))
        return m.Done()

    def _take_buffer(self, fd: int) -> Answer:
        self._buffer = None
        self._buffer = Buffer.received(fd, m.MOST_BUFFER)
        return m.Done()

    def _put_from(self, request: m.PutFrom, buffer: Buffer | None) -> Answer:
        size = 0 if buffer is None else buffer.size
        if buffer is None or not 0 < request.size <= size:
            raise InputError(f"a put of {request.size} bytes from a buffer of {size}; offer a buffer that holds it")
        self._store.put(self._store.receive(request.key.hex(), buffer.view()[: request.size]))
        return m.Done()

    def _get(self, number: int, key: str) -> Answer:
        lent = self._store.lend(key)
        if lent is None:
            return m.Missing()
        if isinstance(lent, Lending):
            return self._lend(number, lent)
        if not isinstance(lent, Aside):
            return m.Direct(0), os.dup(lent.fileno())
        loan = self._note(lent)
        return None if loan is None else (m.Direct(loan), os.dup(lent.parcel.fd))

    def _note(self, lent: Lending | Aside) -> int | None:
        """Note a loan and return its number; None if the client has gone meanwhile."""
        with self._lock:
            loan = self._next
            self._next += 1
            if not self._over:
                self._loans[loan] = lent
        if self._over:  # it came from a slower tier, and who wanted it has gone
            self._store.take_back(lent)
            return None
        return loan

    def _lend(self, number: int, lent: Lending) -> Answer:
        loan = self._note(lent)
        if loan is None:
            return None
        place = lent.image.place
        assert isinstance(place, Slab)  # only what is in the arena is lent
        self._send(number, m.Lent(loan, lent.image.ready, lent.tier, place.offset, place.size))
        return None

    def _await(self, number: int, request: m.Await) -> Answer:
        lent = self._loans.get(request.loan)
        if not isinstance(lent, Lending) or request.layer >= lent.image.layers:
            raise InputError(f"there is no layer {request.layer} of loan {request.loan} to wait for")
        image = lent.image
        image.when(request.layer, lambda: self._answer(number, lambda: _come(image, request.layer)))
        return None

    def _cut_off(self) -> None:
        """Tell a client nothing more that takes nothing; what it was lent stays lent until it ends the connection."""
        self._wire.end_sending()

    def _release(self, request: m.Release) -> Answer:
        self._end_loans(request.loans)
        return None

    def _end_loans(self, loans: Sequence[int]) -> None:
        for loan in loans:
            with self._lock:
                lent = self._loans.pop(loan, None)
            if lent is not None:
                self._store.take_back(lent)

    def _lookup(self, request: m.Lookup) -> Answer:
        keys = [key.hex() for key in request.keys]
        found = self._store.token_ids_of(keys)
        digests = [b"" if ids is None else bytes.fromhex(token_ids_digest(ids)) for ids in found]
        return m.Digests(digests, [self._store.in_memory(key) for key in keys])

    def _token_ids(self, request: m.TokenIdsOf) -> Answer:
        ids = self._store.token_ids(request.key.hex())
        return m.Blob(b"" if ids is None else ids.astype("<i4").tobytes())

    def _pin(self, request: m.Pin) -> Answer:
        keys = [key.hex() for key in request.keys]
        (self._store.pin if request.pinned else self._store.unpin)(keys)
        return m.Done()

    def _earns(self, request: m.Earns) -> Answer:
        earns = self._store.earns(request.key.hex(), request.tokens, request.nbytes, request.tenant)
        return m.Number(int(earns))

    def _discard(self, request: m.Discard) -> Answer:
        self._store.discard(request.key.hex(), request.reason)
        return m.Done()

    def _drop_page_cache(self, _: m.DropPageCache) -> Answer:
        self._store.drop_page_cache()
        return m.Done()

    def _entries(self, request: m.IndexEntries) -> Answer:
        found = self._store.index.entries([key.hex() for key in request.keys])
        return m.Entries(
            [
                m.Entry(bytes.fromhex(e.key), e.fingerprint, recipe_to_json(e.recipe), e.token_ids.tobytes())
                for e in found
            ]
        )

    def _keys(self, request: m.IndexKeys) -> Answer:
        keys = self._store.index.keys(tenant=request.tenant)
        return m.Blob(b"".join(bytes.fromhex(key) for key in keys))

    def _changed(self, request: m.IndexChanged) -> Answer:
        rows = self._store.index.changed_since(request.tick, request.tenant)
        return m.Changes([(bytes.fromhex(key), size, tick) for key, size, tick in rows])


def _come(image: Image, layer: int) -> Answer:
    """The reply to who waited for a layer."""
    return m.Done() if layer < image.ready else m.Lost(image.failure or "it does not come")


_QUICK: dict[type, Callable[..., Answer]] = {
    m.Ping: lambda session, request: m.Done(),
    m.Lookup: Session._lookup,
    m.TokenIdsOf: Session._token_ids,
    m.Release: Session._release,
    m.Hint: lambda session, request: m.Number(int(session._store.hint(request.session, request.what, request.ttl))),
    m.Cancel: lambda session, request: m.Number(session._store.cancel([key.hex() for key in request.keys])),
    m.IndexVersion: lambda session, request: m.Number(session._store.index.version()),
    m.IndexCount: lambda session, request: m.Number(session._store.index.count(request.tenant)),
    m.Stat: lambda session, request: session._daemon.stats(),
}
_SLOW: dict[type, Callable[..., Answer]] = {
    m.Lookup: Session._lookup,
    m.TokenIdsOf: Session._token_ids,
    m.Prefetch: lambda session, request: m.Number(
        session._store.prefetch([key.hex() for key in request.keys], request.priority)
    ),
    m.Earns: Session._earns,
    m.Discard: Session._discard,
    m.Remove: lambda session, request: m.Number(int(session._store.remove(request.key.hex()))),
    m.Pin: Session._pin,
    m.List: lambda session, request: m.Listing(session._store.ls()),
    m.Market: lambda session, request: m.Marketed(session._store.market(request.count)),
    m.Verify: lambda session, request: m.Verified(session._store.verify()),
    m.Collect: lambda session, request: m.Collected(session._store.gc()),
    m.DropPageCache: Session._drop_page_cache,
    m.IndexKeys: Session._keys,
    m.IndexChanged: Session._changed,
    m.IndexEntries: Session._entries,
}

"""A client's connection to a daemon: requests and replies by number, and what the daemon tells on its own."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from blendkv import errors
from blendkv.daemon import address
from blendkv.daemon import messages as m
from blendkv.daemon.arena import Window
from blendkv.daemon.loans import Loan
from blendkv.daemon.receiver import Receiver, Waiter
from blendkv.daemon.wire import Wire, WireError, close_all
from blendkv.errors import BlendKVError, StoreError

PATIENCE = 2.0
"""Seconds that a look-up may take, in a remote tier for instance, before it counts as a miss."""
_UNHURRIED = 1.0  # seconds
_GONE = "the daemon has gone"
_SERIAL = itertools.count()

Answer = TypeVar("Answer")


class DownError(StoreError):
    """No daemon answers."""


class _Call(Waiter):
    """A request that waits for its reply."""

    __slots__ = ("fds", "reply")

    def __init__(self) -> None:
        super().__init__()
        self.reply: m.Reply | None = None
        self.fds: list[int] = []


class Connection:
    """Opens a connection to the daemon of ``store``.

    It has `ended` when the daemon does not answer, or `close` was called. Its socket stays open beyond that, as long as
    chunks are lent: the daemon, which may only have been slow, takes its end for theirs, and uses their memory for
    others.

    Parameters
    ----------
    store
        The store's folder.
    client
        What this process calls itself.
    deadline
        Seconds that a daemon may take to answer what is quick; one that takes longer counts as gone.

    Raises
    ------
    DownError
        If no daemon answers.
    StoreMismatchError
        If it speaks another protocol.
    """

    def __init__(self, store: Path, client: str, deadline: float) -> None:
        self.number = next(_SERIAL)
        """Tells it from every other connection of this process."""
        self.deadline = deadline
        self._loans: dict[int, Loan] = {}
        self._calls: dict[int, _Call] = {}
        self._number = 1  # of the next request
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self.ended = False
        try:
            sock = address.connect(store, deadline)
        except OSError as error:
            raise DownError(f"no daemon answers at {store} ({error.strerror or error})") from error
        sock.settimeout(None)
        address.send_timeout(sock, deadline)
        self._wire: Wire[m.Reply] = Wire(sock, m.REPLIES)
        self._receiver = Receiver(self._wire, self._take, self.close)
        self._receiver.start()
        try:
            reply, fds = self.ask_any(m.Hello(m.PROTOCOL, client, os.getpid()), limit=deadline)
            if not isinstance(reply, m.Welcome) or len(fds) != 1:
                close_all(fds)
                raise DownError(f"what listens at {store} is no daemon of this protocol")
            self.welcome = reply
            self.window = Window(fds[0])
        except BaseException:
            self.close()
            raise

    def ask(
        self, request: m.Request, expected: type[Answer], fds: Sequence[int] = (), limit: float | None = None
    ) -> Answer:
        """Send a request and return its reply; any descriptor that comes with it is closed.

        Raises
        ------
        DownError, StoreError
            As `ask_any`.
        """
        reply, received = self.ask_any(request, fds, limit)
        close_all(received)
        if not isinstance(reply, expected):
            self.close()
            raise DownError(f"the daemon answered {type(request).__name__} with {type(reply).__name__}")
        return reply

    def ask_any(
        self, request: m.Request, fds: Sequence[int] = (), limit: float | None = None
    ) -> tuple[m.Reply, list[int]]:
        """Send a request; return its reply and the descriptors that came along, which are the caller's to close.

        It is waited for as long as the daemon answers pings, and ``limit`` seconds at most; without a limit nobody is
        in a hurry, and a ping may take longer too.

        Raises
        ------
        DownError
            If the daemon is gone or does not answer in time; the connection is closed in the first case.
        StoreError
            What the daemon raised.
        """
        return self._await(*self._begin(request, fds)[0], request, time.monotonic(), limit)

    def ask_each(self, request: m.Request, count: int, limit: float) -> list[tuple[m.Reply, list[int]] | BlendKVError]:
        """Send a request that has ``count`` replies, and return them in order.

        What `ask_any` would raise stands in the place of a reply: none of the others is lost for it. ``limit`` is for
        all together.

        Raises
        ------
        DownError
            If the daemon takes no requests.
        """
        begun = time.monotonic()
        found: list[tuple[m.Reply, list[int]] | BlendKVError] = []
        calls = self._begin(request, (), count)
        try:
            for number, call in calls:
                try:
                    found.append(self._await(number, call, request, begun, limit))
                except BlendKVError as error:
                    found.append(error)
        except BaseException:  # an interrupt: what has come or comes yet is nobody's
            self._abandon(calls)
            raise
        return found

    def _await(
        self, number: int, call: _Call, request: m.Request, begun: float, limit: float | None
    ) -> tuple[m.Reply, list[int]]:
        """`ask_any` for a request that was sent at ``begun``."""
        pace = self.deadline / 2 if limit is not None else max(self.deadline / 2, _UNHURRIED)
        while not self._receiver.wait(call, pace):
            if not self._alive(pace):
                self.close()
            elif limit is not None and time.monotonic() - begun > limit:
                with self._lock:
                    late = self._calls.pop(number, None) is not None
                if late:
                    raise DownError(f"the daemon lives, but {type(request).__name__} took longer than {limit:g} s")
                # Else it is being taken just now, and the next turn finds it.
        if call.reply is None:
            raise DownError(_GONE)
        if isinstance(call.reply, m.Fault):
            close_all(call.fds)
            raise _error(call.reply)
        return call.reply, call.fds

    def loan(self, number: int) -> Loan:
        """The loan of a `Lent` reply."""
        return self._loans[number]

    def expect(self, loan: Loan, layers: int, offset: int, size: int) -> None:
        """A loan is of a chunk of ``layers`` layers in the slab at ``offset``, of which some are still to come."""
        loan.expect(layers, self.window.progress(offset, size), lambda layer: self._await_layer(loan.number, layer))

    def _await_layer(self, loan: int, layer: int) -> str | None:
        reply, fds = self.ask_any(m.Await(loan, layer), limit=math.inf)
        close_all(fds)
        return reply.reason if isinstance(reply, m.Lost) else None

    @property
    def lends(self) -> bool:
        """Whether chunks are lent."""
        return bool(self._loans)

    def release(self, numbers: list[int]) -> None:
        """Loans are over."""
        with self._lock:
            for number in numbers:
                self._loans.pop(number, None)
        if self.ended and not self._loans:
            self._hang_up()
            return
        with suppress(WireError), self._sending:  # for a daemon that is gone they are over anyway
            self._wire.send(0, m.Release(numbers))

    def close(self) -> None:
        """Ask nothing more; what waits for an answer gets none, and no further layers come. Idempotent."""
        with self._lock:
            self.ended = True
            calls, self._calls = self._calls, {}
            loans = list(self._loans.values())
        for loan in loans:
            loan.lose(_GONE)
        for call in calls.values():
            call.finish()
        self._receiver.rouse()
        if not loans:
            self._hang_up()

    def _hang_up(self) -> None:
        """End the connection itself; who is the last to use the socket closes it."""
        self._wire.end()
        with self._sending:
            if self._receiver.done:
                self._wire.close()

    def _begin(self, request: m.Request, fds: Sequence[int], replies: int = 1) -> list[tuple[int, _Call]]:
        """Send a request; return the number of each of its replies, and what waits for it."""
        with self._lock:
            if self.ended:
                raise DownError(_GONE)
            calls = [(self._number + place, _Call()) for place in range(replies)]
            self._number += replies
            self._calls.update(calls)
        try:
            with self._sending:
                self._wire.send(calls[0][0], request, fds)
        except WireError as error:
            self.close()
            raise DownError(f"the daemon takes no requests: {error}") from error
        return calls

    def _abandon(self, calls: Sequence[tuple[int, _Call]]) -> None:
        """Nobody waits for these replies any more."""
        with self._lock:
            for number, _ in calls:
                self._calls.pop(number, None)
        for _, call in calls:
            if isinstance(call.reply, m.Lent | m.Direct):
                self.release([call.reply.loan])
            close_all(call.fds)

    def _alive(self, seconds: float | None = None) -> bool:
        try:
            ((_, call),) = self._begin(m.Ping(), ())
        except DownError:
            return False
        return self._receiver.wait(call, seconds or self.deadline / 2) and call.reply is not None

    def _take(self, number: int, reply: m.Reply, fds: list[int]) -> None:
        with self._lock:
            call = self._calls.pop(number, None)
            if isinstance(reply, m.Lent):  # known before anything more is told of it
                self._loans[reply.loan] = Loan(reply.loan, reply.ready)
        if call is None:  # its caller has given up
            close_all(fds)
            if isinstance(reply, m.Lent | m.Direct):
                self.release([reply.loan])
            return
        call.reply, call.fds = reply, fds
        call.finish()


def _error(fault: m.Fault) -> StoreError | errors.InputError:
    kind = getattr(errors, fault.kind, StoreError)
    if not (isinstance(kind, type) and issubclass(kind, StoreError | errors.InputError)):
        kind = StoreError
    return kind(fault.message)

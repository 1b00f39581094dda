"""Who reads a client's socket: the thread that waits for a reply reads it itself, so that no other has to wake it.

One thread at a time leads: it takes what comes, for itself and for the others, which follow it and sleep. When it has
what it waits for, the next of them leads. While nobody waits, a thread of the receiver's own takes what comes, within
`_TICK`: replies to those that have given up, and the end.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from blendkv.daemon import messages as m
from blendkv.daemon.wire import Wire, WireError

_SPIN = 100e-6  # seconds: a quick reply comes within; to sleep and be woken takes as long
_TICK = 0.05  # seconds
_PAUSE = 0.002  # seconds: the receiver's own thread looks again when another one leads


class Waiter:
    """What a thread waits for; it is ``over`` when it has come, or will not come any more."""

    __slots__ = ("over", "wake")

    def __init__(self) -> None:
        self.over = False
        self.wake: threading.Event | None = None

    def finish(self) -> None:
        """It is over; wakes who waits for it."""
        self.over = True
        wake = self.wake  # read after `over` is set: who is about to sleep sets it first and looks at `over` then
        if wake is not None:
            wake.set()


class Receiver:
    """Takes what comes over ``wire`` until its end.

    Parameters
    ----------
    wire
        Read by nobody else.
    take
        Called with every message, by one thread at a time.
    ended
        Called when nothing can be received any more; maybe more than once.
    """

    def __init__(
        self,
        wire: Wire[m.Reply],
        take: Callable[[int, m.Reply, list[int]], None],
        ended: Callable[[], None],
    ) -> None:
        self._wire = wire
        self._take = take
        self._ended = ended
        self._led = False
        self._followers: dict[Waiter, None] = {}
        self._lock = threading.Lock()
        self._over = False
        self._rouser = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.done = False
        """Whether no thread reads, or will ever again."""
        self._leader_poll = select.poll()
        for fd in (wire.socket, self._rouser):
            self._leader_poll.register(fd, select.POLLIN)

    def start(self) -> None:
        """Begin to take what nobody waits for."""
        threading.Thread(target=self._run, name="blendkv-daemon-client", daemon=True).start()

    def wait(self, waiter: Waiter, seconds: float) -> bool:
        """Wait until ``waiter`` is over, ``seconds`` at most; return whether it is."""
        end = time.monotonic() + seconds
        try:
            while not waiter.over:
                if self._try_to_lead():
                    self._lead(waiter, end)
                    break
                waiter.wake = threading.Event()
                with self._lock:
                    if not self._led:
                        continue
                    self._followers[waiter] = None
                if not waiter.over and not waiter.wake.wait(max(0.0, end - time.monotonic())):
                    break
        finally:
            with self._lock:
                self._followers.pop(waiter, None)
                self._wake_next()  # the turn may have been handed to us
        return waiter.over

    def rouse(self) -> None:
        """Nothing more is waited for: all waiters are over. What comes is taken as before."""
        with self._lock:
            if not self.done:
                os.eventfd_write(self._rouser, 1)

    def _lead(self, waiter: Waiter, end: float) -> None:
        """Take what comes until ``waiter`` is over or the time is."""
        try:
            spun = time.monotonic() + _SPIN
            while not waiter.over:
                now = time.monotonic()
                if self._take_one() or now < spun:
                    continue
                if now >= end or not self._leader_poll.poll(max(1.0, (end - now) * 1e3)):
                    return
        except WireError:
            self._end()
        finally:
            with self._lock:
                self._led = False

    def _take_one(self) -> bool:
        """Take one message if one has come; return whether one had."""
        try:
            found = self._wire.receive_now()
            if found is not None:
                self._take(*found)
        except WireError:
            raise
        except BaseException:  # an interrupt of this thread: another's reply may be lost, which must not wait for it
            self._end()
            raise
        return found is not None

    def _wake_next(self) -> None:
        """Hand the lead to a follower, if nobody has it; the caller has the lock."""
        if not self._led and self._followers:
            following = next(iter(self._followers))
            del self._followers[following]
            assert following.wake is not None
            following.wake.set()

    def _end(self) -> None:
        self._over = True
        self._ended()

    def _run(self) -> None:
        resting = select.poll()
        resting.register(self._wire.socket, select.POLLRDHUP)
        while not self._over:
            resting.poll(_TICK * 1e3)
            if not self._drain():
                time.sleep(_PAUSE)
        while not self._try_to_lead():  # for good
            time.sleep(_PAUSE)
        with self._lock:
            self.done = True
            os.close(self._rouser)
        self._ended()

    def _try_to_lead(self) -> bool:
        with self._lock:
            leads = not self._led
            self._led = True
        return leads

    def _drain(self) -> bool:
        """Take all that has come; return whether nobody else does."""
        if not self._try_to_lead():
            return False
        try:
            while self._take_one():
                pass
        except WireError:
            self._end()
        finally:
            with self._lock:
                self._led = False
                self._wake_next()
        return True

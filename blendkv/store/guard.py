"""The guard before a remote tier: deadlines, a circuit breaker, and the figures that metrics show."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from blendkv.errors import BlendKVError, DamagedChunkError, InputError, StoreError, StoreFullError, TierUnavailableError
from blendkv.store.calls import Call, CallPool, ExpiredError, SaturatedError
from blendkv.store.circuit import CircuitBreaker, State
from blendkv.store.segments import Traffic
from blendkv.store.timing import LATENCY_BUCKETS, Latency, Timings

if TYPE_CHECKING:
    from blendkv.store.remote import Head, RemoteTier

Operation: TypeAlias = Literal["contains", "head", "fetch", "put", "delete", "keys"]
Outcome: TypeAlias = Literal["ok", "miss", "missing", "damaged", "full", "refused", "timeout", "error", "busy", "open"]
"""What became of a call. The tier answered: ``ok``, ``miss`` (no such chunk, or a put of one that was there),
``missing`` (gone between head and layer), ``damaged``, ``full``, ``refused`` (it cannot take that). It did not:
``timeout``, ``error``. It was not asked: ``busy`` (no thread in time), ``open`` (the circuit)."""
_PAGE = 1000
_PROBE_KEY = "0" * 64

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """How long a remote tier may take, and when it is left alone.

    ``deadline_s`` is for a look-up, a read, a deletion and each page of a listing; ``put_s`` for storing a chunk.
    ``threads`` calls run at once. ``failures`` in a row open the circuit, for ``first_back_off_s`` at first and
    ``longest_back_off_s`` at most.
    """

    deadline_s: float = 1.0
    put_s: float = 60.0
    threads: int = 8
    failures: int = 3
    first_back_off_s: float = 0.5
    longest_back_off_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise InputError(f"{name} is {value}; give more than 0")


@dataclass(frozen=True)
class RemoteStat:
    """What a guarded tier did since it was opened.

    ``calls`` counts by operation and outcome, ``latencies`` are those of the calls that reached the tier, by operation.
    ``stuck`` calls have outlasted their callers and hold a thread each.
    """

    name: str
    state: State
    openings: int
    stuck: int
    calls: Mapping[tuple[str, str], int]
    latencies: Mapping[str, Latency]
    traffic: Traffic


class GuardedTier:
    """A remote tier whose calls end in time.

    Every call runs on a thread of its own and is left alone when its time is over; while the circuit is open, calls
    fail at once, and a probe in the background finds out when the tier is back. All methods raise
    `TierUnavailableError` for want of an answer, whatever the cause, and otherwise what the tier's own say.
    """

    def __init__(self, inner: RemoteTier, limits: Limits, circuit: CircuitBreaker | None = None) -> None:
        self.name = inner.name
        self._inner, self._limits = inner, limits
        self._circuit = circuit or CircuitBreaker(limits.failures, limits.first_back_off_s, limits.longest_back_off_s)
        self._pool = CallPool(f"blendkv-{inner.name}", limits.threads)
        self._lock = threading.Lock()
        self._calls: Counter[tuple[str, str]] = Counter()
        self._timings = Timings(LATENCY_BUCKETS)
        self._probe: tuple[Call, float] | None = None
        self._reason = ""
        self._closed = False

    def contains(self, keys: Sequence[str]) -> set[str]:
        """Those of ``keys`` that are there."""
        return self._call("contains", lambda: self._inner.contains(keys), self._limits.deadline_s)

    def head(self, key: str) -> Head | None:
        """The head of the chunk, or None; see `RemoteTier.head`."""
        return self._call("head", lambda: self._inner.head(key), self._limits.deadline_s)

    def fetch(self, head: Head, first: int, into: Sequence[memoryview]) -> None:
        """Read layers ``first``, ``first + 1``, ... in one round trip, each into its memory.

        The memory is written by the calling thread, before this returns, and by nobody after.

        Raises
        ------
        InputError
            If there are no such layers, or the memory has another size than ``head.layers`` says.
        DamagedChunkError
            If they are gone, cut or altered; ``into`` is untouched then.
        """
        sizes, wanted = [view.nbytes for view in into], list(head.layers[first : first + len(into)])
        if first < 0 or not sizes or sizes != wanted:
            raise InputError(f"layers from {first} on have {wanted} bytes, memory for them has {sizes}")
        parts = self._call("fetch", lambda: self._inner.read(head, first, len(into)), self._limits.deadline_s)
        for view, part in zip(into, parts, strict=True):
            view.cast("B")[:] = part

    def put(self, key: str, head: memoryview, layers: Sequence[memoryview]) -> bool:
        """Store a chunk; see `RemoteTier.put`.

        A put that is left alone goes on reading the memory until it ends: give memory that nobody changes.
        """
        return self._call("put", lambda: self._inner.put(key, head, layers), self._limits.put_s)

    def delete(self, key: str) -> bool:
        """Forget a chunk; return whether it was there."""
        return self._call("delete", lambda: self._inner.delete(key), self._limits.deadline_s)

    def keys(self) -> Iterator[str]:
        """The keys of all chunks, read in pages; a key may come twice."""
        keys = self._inner.keys()
        while page := self._call("keys", lambda: list(itertools.islice(keys, _PAGE)), self._limits.deadline_s):
            yield from page

    def stat(self) -> RemoteStat:
        """What was done so far."""
        with self._lock:
            calls = dict(self._calls)
        circuit, stuck = self._circuit, self._pool.stuck
        return RemoteStat(
            self.name, circuit.state, circuit.openings, stuck, calls, self._timings.read(), self._inner.traffic
        )

    def close(self) -> None:
        """Close the tier; calls under way are left alone. Idempotent."""
        self._closed = True
        self._pool.close()
        self._inner.close()

    def _call(self, operation: Operation, function: Callable[[], T], seconds: float) -> T:
        if self._closed:
            raise StoreError(f"remote tier {self.name} is closed; open it again")
        self._admit(operation)
        begun = time.monotonic()
        try:
            result = self._pool.run(function, seconds)
        except SaturatedError:
            self._count(operation, "busy")
            raise self._unavailable("all its threads wait for answers that do not come") from None
        except ExpiredError as error:
            if not error.started:  # other calls took its time: they tell of the tier's state
                self._count(operation, "busy")
                raise self._unavailable(f"no thread was free within {seconds:g} s") from None
            raise self._failed(operation, "timeout", begun, f"no answer within {seconds:g} s") from None
        except TierUnavailableError as error:
            self._failed(operation, "error", begun, str(error))
            raise
        except BlendKVError as error:
            self._answered(operation, _outcome(error), begun)
            raise
        except Exception as error:  # the client's own mistakes must not reach who can do nothing about them
            raise self._failed(operation, "error", begun, f"{type(error).__name__}: {error}") from error
        self._answered(operation, "miss" if result is None or result is False else "ok", begun)
        return result

    def _admit(self, operation: Operation) -> None:
        """Let the call pass, or raise; starts the probe when it is time for one."""
        admitted = self._circuit.admit()
        if admitted == "go":
            return
        if admitted == "probe":
            self._start_probe()
        else:
            self._give_up_probe()
        self._count(operation, "open")
        raise self._unavailable(f"it is left alone for {self._circuit.wait_s:.1f} s; the reason: {self._reason}")

    def _start_probe(self) -> None:
        def probe() -> None:
            well = False
            try:
                self._inner.contains([_PROBE_KEY])
                well = True
            except Exception as error:
                _log.debug("remote tier %s: the probe failed: %s", self.name, error)
            self._end_probe(call, well)

        with self._lock:  # held until `_probe` names it: the probe's own end waits for that
            try:
                call = self._pool.start(probe)
            except SaturatedError:
                self._circuit.probed(False)
                return
            self._probe = call, time.monotonic() + self._limits.deadline_s

    def _give_up_probe(self) -> None:
        """A probe that hangs has failed; whoever comes next finds out."""
        probe = self._probe
        if probe is not None and time.monotonic() > probe[1] and self._pool.abandon(probe[0]):
            self._end_probe(probe[0], False)

    def _end_probe(self, call: Call, well: bool) -> None:
        with self._lock:
            if self._probe is None or self._probe[0] is not call:  # given up before
                return
            self._probe = None
        self._circuit.probed(well)
        if well:
            _log.info("remote tier %s answers again", self.name)

    def _failed(self, operation: Operation, outcome: Outcome, begun: float, reason: str) -> TierUnavailableError:
        self._count(operation, outcome, time.monotonic() - begun)
        self._reason = reason
        if self._circuit.failed():
            _log.warning("remote tier %s is left alone for now, and probed: %s", self.name, reason)
        return self._unavailable(reason)

    def _answered(self, operation: Operation, outcome: Outcome, begun: float) -> None:
        self._count(operation, outcome, time.monotonic() - begun)
        self._circuit.succeeded()

    def _unavailable(self, reason: str) -> TierUnavailableError:
        return TierUnavailableError(f"remote tier {self.name} is not available: {reason}")

    def _count(self, operation: Operation, outcome: Outcome, seconds: float | None = None) -> None:
        with self._lock:
            self._calls[operation, outcome] += 1
        if seconds is not None:
            self._timings.add(operation, seconds)


def _outcome(error: BlendKVError) -> Outcome:
    if isinstance(error, DamagedChunkError):
        return "missing" if error.reason.startswith("missing") else "damaged"
    return "full" if isinstance(error, StoreFullError) else "refused"

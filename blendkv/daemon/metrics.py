"""The daemon's own page of metrics, over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from blendkv.daemon.server import Daemon
from blendkv.errors import InputError, StoreError
from blendkv.observe.families import Sample, filled, gauge
from blendkv.observe.tiers import STORE, samples

_FAMILIES = {
    **STORE,
    "daemon_clients": gauge("Engines and commands that are connected.", "store"),
    "daemon_loans": gauge("Chunk KVs in shared memory that clients use now.", "store"),
    "daemon_loads_waiting": gauge("Chunk KVs on their way to shared memory, those that wait included.", "store"),
    "daemon_arena_bytes": gauge("Bytes of shared memory.", "store"),
    "daemon_arena_free_bytes": gauge("Bytes of shared memory in which nothing lies.", "store"),
}

_log = logging.getLogger(__name__)


class DaemonCollector(Collector):
    """Reads a daemon when the metrics are read; its store has the name of its folder."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._told = False

    def describe(self) -> Iterable[Metric]:
        """The families, so that registering need not read the store."""
        return filled(_FAMILIES)

    def collect(self) -> Iterable[Metric]:
        """The families with what the daemon says now; without samples if its index cannot be read."""
        try:
            return filled(_FAMILIES, list(_of(self._daemon)))
        except StoreError as error:
            if not self._told:
                _log.warning("metrics have nothing of the store (said once): %s", error)
            self._told = True
            return filled(_FAMILIES)


@contextmanager
def serving_metrics(daemon: Daemon, host: str, port: int) -> Iterator[int]:
    """Serve ``/metrics`` at ``host:port`` while the block runs; yields the port, a free one if ``port`` is 0.

    Raises
    ------
    InputError
        If nobody can listen there.
    """
    registry = CollectorRegistry()
    registry.register(DaemonCollector(daemon))
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise InputError(
            f"metrics cannot be served at {host}:{port} ({error.strerror or error}); give another --metrics-port"
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _of(daemon: Daemon) -> Iterable[Sample]:
    name, stats = daemon.root.absolute().name, daemon.stats()
    yield from samples(name, stats.store, daemon.store.index.usage.read())
    yield "daemon_clients", (name,), stats.clients
    yield "daemon_loans", (name,), stats.loans
    yield "daemon_loads_waiting", (name,), stats.loading
    yield "daemon_arena_bytes", (name,), daemon.store.arena.size
    yield "daemon_arena_free_bytes", (name,), stats.free_bytes

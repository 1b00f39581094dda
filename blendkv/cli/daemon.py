"""`blendkv daemon`."""

from __future__ import annotations

import json
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blendkv import __version__
from blendkv.cli.common import Disk, Encrypt, Json, Store, err
from blendkv.config import format_bytes, parse_bytes
from blendkv.errors import InputError, MissingDependencyError
from blendkv.market.base import USUAL

if TYPE_CHECKING:
    from blendkv.daemon.server import Daemon


def daemon(
    store: Store,
    memory: Annotated[str, typer.Option(help="Shared memory for chunk KVs, such as 64GB.")] = "4GB",
    disk: Disk = None,
    socket_mode: Annotated[
        str, typer.Option(help="Who may connect, as the socket's file mode: 600 the own user, 660 the group.")
    ] = "600",
    remote: Annotated[
        list[str] | None,
        typer.Option(
            help="A remote tier, such as redis://HOST or s3://BUCKET; several, fastest first (docs/remote.md)."
        ),
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="Whose chunks are seen in remote tiers: TENANT or TENANT/MODEL.")
    ] = "default",
    quota: Annotated[
        list[str] | None,
        typer.Option(help="NAME=BYTES that a tenant may have in memory, and on disk, such as acme=10GB; several."),
    ] = None,
    tenant_quota: Annotated[
        str | None, typer.Option(help="Bytes that every other tenant may have, such as 5GB; no limit by default.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="What leaves memory first: market, lru, arc, gdsf, ...; see docs/market.md.")
    ] = USUAL,
    prefill_rate: Annotated[
        float | None,
        typer.Option(help="Tokens per second that engines prefill, for what a hit saves; 5,000 by default."),
    ] = None,
    warm: Annotated[
        bool,
        typer.Option("--warm/--no-warm", help="Fill memory from disk at the start, the most valuable chunks first."),
    ] = True,
    encrypt: Encrypt = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve Prometheus metrics at this port, such as 9464; 0: a free one.", min=0, max=65535),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="Address to serve them at; the page asks for no key.")
    ] = "127.0.0.1",
    as_json: Json = False,
) -> None:
    """Keep the store in a process of its own, shared by engines over shared memory, until SIGTERM."""
    from blendkv.daemon.server import Daemon
    from blendkv.store.quotas import Quotas

    mode = _mode(socket_mode)
    limits = parse_bytes(memory), None if disk is None else parse_bytes(disk)
    quotas = Quotas.parse(quota or (), tenant_quota)
    root = Path(store).expanduser()
    # Blocked in every thread and waited for in this one: Python runs a handler only when the main thread is woken,
    # and a signal may reach any thread.
    ending = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    with (
        Daemon(
            root,
            *limits,
            policy=policy,
            mode=mode,
            remotes=remote or (),
            namespace=namespace,
            quotas=quotas,
            encrypt=encrypt or None,
            warm=warm,
            prefill_rate=prefill_rate,
        ) as running,
        _metrics(running, metrics_host, metrics_port) as url,
    ):
        chunks = running.store.index.count()
        if as_json:  # no torch in this process, so no more of the environment than this
            place: dict[str, Any] = {"store": str(root.absolute()), "metrics": url}
            row = {**place, "memory_bytes": limits[0], "disk_bytes": limits[1], "chunks": chunks}
            environment = {"python": platform.python_version(), "system": platform.platform()}
            print(json.dumps({"command": "daemon", "version": __version__, "environment": environment, "rows": [row]}))
            sys.stdout.flush()
        else:
            size = format_bytes(limits[0])
            line = f"the store {root} with {chunks} chunk KVs is open to engines; {size} of shared memory"
            err.print(line if url is None else f"{line}; metrics at {url}", soft_wrap=True, markup=False)
        threading.Thread(target=running.serve, name="blendkv-accept").start()
        signal.sigwait(ending)


@contextmanager
def _metrics(running: Daemon, host: str, port: int | None) -> Iterator[str | None]:
    """Serve the metrics if there is a port for them; yields their URL."""
    if port is None:
        yield None
        return
    try:
        from blendkv.daemon.metrics import serving_metrics
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"metrics need {error.name!r}; run: pip install 'blendkv[serve]'") from error
    with serving_metrics(running, host, port) as used:
        yield f"http://{host}:{used}/metrics"


def _mode(text: str) -> int:
    if len(text) != 3 or any(digit not in "0246" for digit in text):
        raise InputError(f"socket mode {text!r} is not allowed; give 600, 660 or 666")
    return int(text, 8)

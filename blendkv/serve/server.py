"""The process around the app: socket, signals, a shutdown that lets running requests end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from fastapi import FastAPI

from blendkv.serve.app import create_app
from blendkv.serve.backends import Backends
from blendkv.serve.service import Service
from blendkv.serve.settings import ServeSettings

_CANCEL_S = 2
"""Seconds that cancelled requests have to end before the process does."""
_log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn, with a SIGTERM that first drains and then ends with exit code 0.

    After the first signal ``/health`` answers 503 with ``draining`` and new requests are refused, while the running
    ones have the grace time; then, or as soon as nothing runs, the server closes. A second signal ends the grace time.
    """

    def __init__(self, app: FastAPI, settings: ServeSettings, ready: Callable[[], None]) -> None:
        # Protocol upgrades are not served, and records go to this process's own logging.
        super().__init__(
            uvicorn.Config(
                app, log_config=None, access_log=False, ws="none", lifespan="on", server_header=False,
                timeout_graceful_shutdown=_CANCEL_S,
            )
        )  # fmt: skip
        self._app, self._grace, self._ready = app, settings.grace, ready
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain at SIGTERM and SIGINT; uvicorn's own way would end the process by the signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._cut_off()

    async def _drain(self) -> None:
        admission = self._app.state.admission
        admission.draining = True
        _log.info("draining: %d requests are running", admission.running)
        try:
            async with asyncio.timeout(self._grace):
                await admission.idle()
        except TimeoutError:
            _log.warning("%d requests were still running after %g seconds", admission.running, self._grace)
            self._cut_off()
        self.should_exit = True

    def _cut_off(self) -> None:
        """End what still runs."""
        self._app.state.service.stopping.set()
        for task in list(self.server_state.tasks):
            task.cancel()
        self.should_exit = True


async def run(
    open_backends: Callable[[], Awaitable[Backends]],
    settings: ServeSettings,
    listening: socket.socket,
    ready: Callable[[Backends], None],
) -> None:
    """Open the backends on the running event loop and serve until a signal comes.

    ``ready`` is called once requests are taken.
    """
    backends = await open_backends()
    app = create_app(backends, settings)
    service: Service = app.state.service
    try:
        await service.thread(service.warm_up)
    except BaseException:
        service.close()
        raise
    await Server(app, settings, lambda: ready(backends)).serve([listening])

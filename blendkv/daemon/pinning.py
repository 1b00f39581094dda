"""Page-locked memory for engines on CUDA: a client's mapping of the daemon's arena, registered with the driver.

Copies from page-locked memory run at the speed of the bus and beside other work; from any other memory the driver
copies twice. Registering touches and locks every page of the arena, so that all of it is taken from the system.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from blendkv.daemon.arena import Window
from blendkv.daemon.client import DaemonStore
from blendkv.store.door import Store

if TYPE_CHECKING:
    import torch

PORTABLE, READ_ONLY = 0x01, 0x08
"""Flags of ``cudaHostRegister``: for all contexts of the process; of a mapping that can only be read."""

_log = logging.getLogger(__name__)


def pin_for(store: Store, device: torch.device) -> bool:
    """Let an engine on ``device`` read a daemon's memory page-locked; return whether that is being tried.

    Copies from such memory outlast the call that begins them: the engine waits for them before it gives chunks back.
    Nothing is done for another device than CUDA, or for a store in this process, whose chunks lie in memory of torch's.
    """
    import torch

    if device.type != "cuda" or not torch.cuda.is_available() or not isinstance(store, DaemonStore):
        return False
    store.pin_memory(Pinning(torch.cuda.cudart(), partial(torch.cuda.synchronize, device)))
    return True


class Pinning:
    """Keeps the arena of the daemon that answers registered, on a thread: locking many pages takes seconds.

    Until it is done, and where it fails, copies go on from ordinary memory.

    Parameters
    ----------
    cudart
        ``torch.cuda.cudart()``.
    synchronize
        Waits for all copies under way: what they read must not be unlocked.
    """

    def __init__(self, cudart: Any, synchronize: Callable[[], None]) -> None:
        self._cudart = cudart
        self._synchronize = synchronize
        self._address: int | None = None
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self.failures = 0
        """How often an arena could not be registered or unregistered."""
        self.used = False
        """Whether an arena was registered so far."""

    def take(self, window: Window) -> None:
        """Register the arena behind ``window`` in the background, in place of the one before."""
        # A failed call leaves its error behind for the next one of the same thread to report: here that is nobody's.
        thread = threading.Thread(target=self._register, args=(window,), name="blendkv-pinning", daemon=True)
        self._threads = [*(t for t in self._threads if t.is_alive()), thread]
        thread.start()

    def wait(self) -> None:
        """Wait for what is under way."""
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """Wait for what is under way, and unregister. What was lent can be read as before. Idempotent."""
        self.wait()
        with self._lock:
            self._closed = True
            self._unregister()

    def _register(self, window: Window) -> None:
        with self._lock:
            if self._closed:
                return
            self._unregister()
            try:
                address, size = window.share()
                # Not the private mapping: to lock its pages would copy them, and what the daemon writes later is lost.
                self._check("cudaHostRegister", self._cudart.cudaHostRegister(address, size, PORTABLE | READ_ONLY))
            except (OSError, RuntimeError) as error:
                self._failed(error)
                return
            self._address = address
            self.used = True
            window.use_shared()

    def _unregister(self) -> None:
        if self._address is None:
            return
        address, self._address = self._address, None
        try:
            self._synchronize()
            self._check("cudaHostUnregister", self._cudart.cudaHostUnregister(address))
        except RuntimeError as error:
            self._failed(error)

    def _check(self, call: str, found: Any) -> None:
        if found != self._cudart.cudaError.success:
            raise RuntimeError(f"{call} returned {int(found)}")

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            _log.warning(
                "the daemon's memory cannot be page-locked, and is copied as ordinary memory, later failures are only "
                "counted: %s", error
            )  # fmt: skip

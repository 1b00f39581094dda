"""A TCP proxy that makes a network bad: slow, narrow, silent, or broken off."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time


class ToxicProxy:
    """Forwards connections to ``target`` (host, port); what ails it can be changed at any time.

    Attributes
    ----------
    delay_s
        Seconds that every piece of an answer is held back.
    bytes_per_s
        How fast answers pass; None means as fast as they come.
    black_hole
        Nothing passes and nothing is closed; new connections are accepted all the same.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.black_hole = False
        self.refused = 0
        self._resets = False
        self._target = target
        self._pairs: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self) -> None:
        """All is well again, for new connections and for those that still stand."""
        self.delay_s, self.bytes_per_s, self.black_hole, self._resets = 0.0, None, False, False

    def reset(self) -> None:
        """Break off every connection, and from now on every new one."""
        self._resets = True
        self._break_all()

    def close(self) -> None:
        """End everything."""
        self._closed.set()
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._break_all()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._resets:
                self.refused += 1
                _break(client)
                continue
            try:
                server = socket.create_connection(self._target, timeout=10)
            except OSError:
                _break(client)
                continue
            server.settimeout(None)
            with self._lock:
                self._pairs |= {client, server}
            for source, sink, answers in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pump, args=(source, sink, answers), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(16384):
                if answers and self.delay_s:
                    self._closed.wait(self.delay_s)
                while data:
                    while self.black_hole and not self._closed.is_set():
                        time.sleep(0.005)
                    rate = self.bytes_per_s if answers else None
                    piece = data if rate is None else data[: max(1, int(rate / 100))]
                    if rate is not None:
                        time.sleep(len(piece) / rate)
                    sink.sendall(piece)
                    data = data[len(piece) :]
        except OSError:
            pass
        finally:
            with self._lock:
                self._pairs -= {source, sink}
            for side in (source, sink):
                with contextlib.suppress(OSError):
                    side.shutdown(socket.SHUT_RDWR)
            source.close()

    def _break_all(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for side in pairs:
            _break(side)


def _break(side: socket.socket) -> None:
    """Close with a reset; shutting down first wakes the thread that reads from it."""
    with contextlib.suppress(OSError):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        side.shutdown(socket.SHUT_RDWR)
    side.close()

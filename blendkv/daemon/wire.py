"""Messages and descriptors over a Unix socket that keeps message boundaries (``SOCK_SEQPACKET``).

A packet is a request number, little-endian in 8 bytes (0: nobody asked), and the message in msgpack. What is longer
than `PACKET` travels in sealed memory: the packet then is the number and nothing else, and the first descriptor holds
the message.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from blendkv.daemon.shm import Parcel
from blendkv.errors import StoreError

PACKET = 32 << 10
"""Bytes of a message that travels in the packet itself."""
MOST_BYTES = 256 << 20
"""Bytes of the longest message."""
MOST_FDS = 2
_NUMBER = 8

Incoming = TypeVar("Incoming")


class WireError(StoreError):
    """The peer sent what is no message, or is gone."""


class Wire(Generic[Incoming]):
    """One end of a connection: sends any message, receives those of ``decoder``.

    Parameters
    ----------
    sock
        A connected ``SOCK_SEQPACKET`` socket; it is ours from here on.
    decoder
        Of the messages that may come.
    """

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Incoming]) -> None:
        self.socket = sock
        self._decoder = decoder

    def send(self, number: int, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send one message.

        Raises
        ------
        WireError
            If the peer is gone, or takes nothing for as long as the socket's timeout.
        """
        data = msgspec.msgpack.encode(message)
        parcel = None
        if len(data) > PACKET:
            parcel = Parcel.create(len(data))
            with parcel.writable() as view:
                view[:] = data
            parcel.seal()
            fds, data = [parcel.fd, *fds], b""
        try:
            socket.send_fds(self.socket, [number.to_bytes(_NUMBER, "little"), data], list(fds))
        except OSError as error:
            raise WireError(f"the connection is broken ({error})") from error
        finally:
            if parcel is not None:
                parcel.close()

    def receive(self) -> tuple[int, Incoming, list[int]]:
        """Receive one message: its number, itself, and its descriptors, which are the caller's to close.

        Raises
        ------
        WireError
            If the peer is gone or what it sent is no message; nothing can be received after that.
        """
        fds: list[int] = []
        try:
            try:
                packet, fds, flags, _ = socket.recv_fds(
                    self.socket, _NUMBER + PACKET, MOST_FDS + 1, socket.MSG_CMSG_CLOEXEC
                )
            except OSError as error:
                raise WireError(f"the connection is broken ({error})") from error
            if not packet:
                raise WireError("the peer has gone")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(packet) < _NUMBER:
                raise WireError("a packet has the wrong size")
            number, data = int.from_bytes(packet[:_NUMBER], "little"), packet[_NUMBER:]
            body: bytes | memoryview = data
            if not data:
                if not fds:
                    raise WireError("a packet has neither a message nor memory that holds one")
                body = _in_memory(fds.pop(0))
            try:
                message = self._decoder.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise WireError(f"a packet holds no known message ({error})") from error
        except BaseException:
            close_all(fds)
            raise
        return number, message, fds

    def end(self) -> None:
        """End the connection; who waits in `receive` wakes with an error. The socket is still to be closed."""
        self._shut(socket.SHUT_RDWR)

    def end_sending(self) -> None:
        """Send nothing more; the peer reads what is on its way, then the end."""
        self._shut(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket. Only when no thread can be in `send` or `receive`: its number may be another's at once."""
        self.end()
        self.socket.close()

    def _shut(self, how: int) -> None:
        with suppress(OSError):  # it is gone already
            self.socket.shutdown(how)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that nobody wants."""
    for fd in fds:
        os.close(fd)


def _in_memory(fd: int) -> memoryview:
    try:
        parcel = Parcel.received(fd)
    except StoreError as error:
        raise WireError(str(error)) from error
    if parcel.size > MOST_BYTES:
        raise WireError(f"a message of {parcel.size} bytes is too long; {MOST_BYTES} are allowed")
    return parcel.view()

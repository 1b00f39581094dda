"""Messages and descriptors over a Unix socket that keeps message boundaries (``SOCK_SEQPACKET``).

A packet is a request number, little-endian in 8 bytes (0: nobody asked), and the message in msgpack. What is longer
than `PACKET` travels in sealed memory: the packet then is the number and nothing else, and the first descriptor holds
the message.
"""

from __future__ import annotations

import array
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
NUMBERS = 1 << 8 * _NUMBER
"""Requests are numbered below this."""
_FD_BYTES = array.array("i").itemsize
_ROOM = socket.CMSG_SPACE((MOST_FDS + 1) * _FD_BYTES)  # for one too many, so that it shows

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
        self._packet = memoryview(bytearray(_NUMBER + PACKET))

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
        packet = number.to_bytes(_NUMBER, "little") + data
        try:
            if fds:
                socket.send_fds(self.socket, [packet], list(fds))
            else:
                self.socket.send(packet)
        except OSError as error:
            raise WireError(f"the connection is broken ({error})") from error
        finally:
            if parcel is not None:
                parcel.close()

    def receive(self) -> tuple[int, Incoming, list[int]]:
        """Receive one message: its number, itself, and its descriptors, which are the caller's to close.

        One thread at a time.

        Raises
        ------
        WireError
            If the peer is gone or what it sent is no message; nothing can be received after that.
        """
        found = self._receive(0)
        assert found is not None
        return found

    def receive_now(self) -> tuple[int, Incoming, list[int]] | None:
        """`receive` what has come already; None if nothing has."""
        return self._receive(socket.MSG_DONTWAIT)

    def _receive(self, flags: int) -> tuple[int, Incoming, list[int]] | None:
        try:
            size, ancillary, flags, _ = self.socket.recvmsg_into([self._packet], _ROOM, socket.MSG_CMSG_CLOEXEC | flags)
        except BlockingIOError:
            return None
        except OSError as error:
            raise WireError(f"the connection is broken ({error})") from error
        fds = _descriptors(ancillary)
        try:
            if not size:
                raise WireError("the peer has gone")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or size < _NUMBER:
                raise WireError("a packet has the wrong size")
            body = self._packet[_NUMBER:size]
            if not body:
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
        return int.from_bytes(self._packet[:_NUMBER], "little"), message, fds

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


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    return list(fds)


def _in_memory(fd: int) -> memoryview:
    try:
        parcel = Parcel.received(fd)
    except StoreError as error:
        raise WireError(str(error)) from error
    if parcel.size > MOST_BYTES:
        raise WireError(f"a message of {parcel.size} bytes is too long; {MOST_BYTES} are allowed")
    return parcel.view()

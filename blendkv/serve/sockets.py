"""The socket of the server: taken before a model is loaded, so that a wrong address is said at once."""

from __future__ import annotations

import socket

from blendkv.errors import InputError


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and not listening yet; port 0 takes a free one.

    Raises
    ------
    InputError
        If the address cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port} ({error.strerror}); give another --host or --port") from error
    return bound

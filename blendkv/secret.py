"""Secrets: 32 random bytes in an environment variable, in base64. Messages never repeat them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from blendkv.errors import InputError

SECRET_BYTES = 32


def secret_from(variable: str, environ: Mapping[str, str]) -> bytes | None:
    """The secret in an environment variable; None if it is not set.

    Raises
    ------
    InputError
        If it is not 32 bytes in base64.
    """
    text = environ.get(variable)
    if not text:
        return None
    try:
        secret = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise InputError(
            f"{variable} is not {SECRET_BYTES} bytes in base64; make one with: openssl rand -base64 {SECRET_BYTES}"
        )
    return secret

"""Tenants: whose chunk KVs these are.

A tenant's tag is a keyed hash of its name. It is part of every recipe and so of every chunk key: without the
deployment's salt nobody can build the key of another tenant's chunk, nor ask whether there is one. Whoever has a tag
can use that tenant's chunks: treat it as a password, and the salt as the master key.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping

from blendkv.errors import InputError
from blendkv.secret import SECRET_BYTES, secret_from

SALT_VARIABLE = "BLENDKV_TENANT_SALT"
"""The environment variable with the deployment's salt: 32 bytes in base64."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TAG_BYTES = 16


def tenant_tag(name: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """The tag of a tenant, 32 hex digits: BLAKE2b-128 of its name, keyed with the salt. Empty for None: no tenant.

    Raises
    ------
    InputError
        If the name cannot be one, or the salt in ``BLENDKV_TENANT_SALT`` is missing or not 32 bytes in base64.
    """
    if name is None:
        return ""
    if not _NAME.fullmatch(name):
        raise InputError(f"tenant {name[:80]!r}: give a name of letters, digits, '.', '_' and '-', 64 at most")
    salt = secret_from(SALT_VARIABLE, environ)
    if salt is None:
        raise InputError(
            f"tenant {name!r} was named and {SALT_VARIABLE} is not set; set it to {SECRET_BYTES} bytes in base64, the "
            "same wherever the store is used"
        )
    return hashlib.blake2b(name.encode(), digest_size=_TAG_BYTES, key=salt, person=b"blendkv tenant").hexdigest()

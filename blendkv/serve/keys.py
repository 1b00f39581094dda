"""API keys, and whose they are: tenants of one server, each with its share of it, its chunk KV and its collections."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from blendkv.errors import InputError
from blendkv.tenants import tenant_tag


class Client(NamedTuple):
    """Whose a request is.

    Attributes
    ----------
    tenant
        Name of the tenant; empty where the server knows of none.
    collections
        Names of the stores that it may use; None: all.
    """

    tenant: str = ""
    collections: frozenset[str] | None = None


ANYBODY = Client()
Keys = Mapping[str, Client]
"""Clients by API key."""


def client_of(given: bytes, keys: Keys) -> Client | None:
    """Whose key this is, None for nobody's; how long that takes tells nothing about any key."""
    found = None
    for key, client in keys.items():
        if hmac.compare_digest(given, key.encode()):
            found = client
    return found


def read_keys(path: Path) -> dict[str, Client]:
    """Read a file of keys: lines ``TENANT KEY``, or ``TENANT KEY COLLECTION,COLLECTION``.

    Blank lines and those that begin with ``#`` are skipped. A tenant may have several keys, so that one can be replaced
    while both hold.

    Raises
    ------
    InputError
        If the file cannot be read, a line has another form, a key came twice, or a tenant cannot be one (which takes
        the salt in ``BLENDKV_TENANT_SALT``). No message quotes a key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--api-keys {path} cannot be read ({error}); give a text file of lines: TENANT KEY") from None
    found: dict[str, Client] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) not in (2, 3) or not words[1].isascii():
            raise InputError(
                f"{path}, line {number}: {len(words)} words; give TENANT KEY, or TENANT KEY COLLECTION,COLLECTION, the "
                "key in ASCII"
            )
        if words[1] in found:
            raise InputError(f"{path}, line {number}: this key came before; give each line one of its own")
        tenant_tag(words[0])
        found[words[1]] = Client(words[0], frozenset(words[2].split(",")) if len(words) == 3 else None)
    if not found:
        raise InputError(f"--api-keys {path} holds no key; give lines: TENANT KEY")
    return found


def check_collections(clients: Iterable[Client], stores: Collection[str]) -> None:
    """Refuse clients of collections that the server does not have.

    Raises
    ------
    InputError
        With the name.
    """
    for client in clients:
        for name in sorted((client.collections or frozenset()) - set(stores)):
            raise InputError(
                f"tenant {client.tenant!r} has a collection {name!r:.80} in --api-keys; stores that are given: "
                f"{', '.join(stores)}"
            )

"""What a server allows and how long it waits; the named stores of the command line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blendkv.errors import InputError
from blendkv.market.admission import LONGEST, TARGETS, AdmissionSettings
from blendkv.market.base import UNKNOWN
from blendkv.serve.keys import ANYBODY, Keys

KEY_VARIABLE = "BLENDKV_API_KEY"
DEFAULT_STORE = "default"


@dataclass(frozen=True)
class ServeSettings:
    """Limits of a server.

    Attributes
    ----------
    api_key
        What requests must carry as ``Authorization: Bearer KEY``; None lets everybody in.
    clients
        Instead of it, keys of tenants (`blendkv.serve.keys`).
    max_body_bytes
        Larger bodies are refused (413).
    max_requests
        Requests served at once, those that wait for the engine included; more are refused (429). With several tenants
        each may have its part of them.
    request_timeout
        Seconds until a request is given up (504); 0 for no limit. Ingest is exempt.
    grace
        Seconds that running requests have to end after SIGTERM.
    max_tokens
        Length of an answer when a request names none.
    slots
        Requests that the engine works on at once; 0: one for an engine that runs one at a time, else ``max_requests``.
    targets
        Seconds by workload class in whose proportion requests wait (`blendkv.market.admission`); None: first come,
        first served.
    patience
        A request that is expected to wait longer than so many seconds is refused (429); 0: none is.
    queue
        Requests of one tenant that may wait for the engine; more are refused (429); 0: as many as are served.
    longest
        Seconds after which a request that waits goes before others, whatever their classes; 0: never.
    """

    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 32 << 20
    max_requests: int = 64
    request_timeout: float = 300.0
    grace: float = 30.0
    max_tokens: int = 256
    slots: int = 0
    targets: Mapping[str, float] | None = field(default_factory=lambda: dict(TARGETS))
    patience: float = 0.0
    queue: int = 0
    longest: float = LONGEST
    clients: Keys = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip() == self.api_key != ""):
            raise InputError("the API key is empty, has blanks around it or is not ASCII; give another one")
        if self.api_key is not None and self.clients:
            raise InputError(f"--api-keys is given, and --api-key or ${KEY_VARIABLE} too; give one of them")
        for name in ("max_body_bytes", "max_requests", "max_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is allowed")
        if self.slots < 0:
            raise InputError(f"slots is {self.slots}; 0 or more is allowed")
        self.admission(1)  # refuses what makes no sense
        for name in ("request_timeout", "grace"):
            if not getattr(self, name) >= 0.0:
                raise InputError(f"{name} is {getattr(self, name)} seconds; 0 or more is allowed")

    def admission(self, slots: int) -> AdmissionSettings:
        """The knobs of the door."""
        if self.targets is None:
            return AdmissionSettings({UNKNOWN: 1.0}, slots, self.patience, self.queue, longest=0.0, warm=1.0)
        return AdmissionSettings(self.targets, slots, self.patience, self.queue, self.longest)

    @property
    def keys(self) -> Keys:
        """Clients by the keys that requests may carry; none: no key is asked for."""
        return self.clients if self.api_key is None else {self.api_key: ANYBODY}

    @property
    def tenants(self) -> int:
        """How many share the server."""
        return max(1, len({client.tenant for client in self.clients.values()}))


def key_from(option: str | None) -> str | None:
    """The API key of the command line, or else of the environment variable ``BLENDKV_API_KEY``."""
    return option if option is not None else os.environ.get(KEY_VARIABLE) or None


def parse_arguments(values: Sequence[str]) -> dict[str, Any]:
    """Read ``KEY=VALUE``, several times; a value that is JSON is one, any other is a string.

    Raises
    ------
    InputError
        If one has another form.
    """
    found: dict[str, Any] = {}
    for text in values:
        name, sign, value = text.partition("=")
        if not (sign and name.isidentifier()):
            raise InputError(f"--engine-arg {text!r} is not KEY=VALUE; give for instance max_model_len=8192")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def parse_targets(values: Sequence[str]) -> dict[str, float]:
    """Read ``CLASS=SECONDS``, several times, over the built-in targets.

    Raises
    ------
    InputError
        If one has another form.
    """
    targets = dict(TARGETS)
    for text in values:
        name, sign, value = text.partition("=")
        try:
            targets[name] = float(value)
        except ValueError:
            sign = ""
        if not (sign and name):
            raise InputError(f"--target {text!r} is not CLASS=SECONDS; give for instance agent=1")
    return targets


def parse_stores(values: Sequence[str]) -> dict[str, Path]:
    """Read ``DIR`` or ``NAME=DIR``, several times; one without a name is called ``default``.

    Raises
    ------
    InputError
        If there is none, a name is not of letters, digits, ``.``, ``_`` and ``-``, or a name or folder came twice.
    """
    stores: dict[str, Path] = {}
    for value in values:
        name, sign, folder = value.partition("=")
        if not sign or "/" in name:
            name, folder = DEFAULT_STORE, value
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}", name) or not folder:
            raise InputError(
                f"--store {value!r} is neither DIR nor NAME=DIR; a name has letters, digits, '.', '_', '-'"
            )
        path = Path(folder).expanduser().absolute()
        if name in stores or path in stores.values():
            raise InputError(f"--store {value!r}: this name or folder came already; give each store one of its own")
        stores[name] = path
    if not stores:
        raise InputError("no store is given; name one with --store DIR")
    return stores

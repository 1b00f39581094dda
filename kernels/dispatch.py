"""Which implementation of an op runs: chosen by device, by what is installed, and by what the arguments ask for.

An implementation is a module ``kernels/<op>/<backend>.py`` with two functions of the op's own arguments: ``run``, and
``refuses``, which says in words why it cannot take them (None if it can). A backend is tried in the order of
`PREFERENCE`; what could not be used is noted with the reason, logged once, and shown by ``blendkv doctor``.

``BLENDKV_KERNELS`` forces a backend: a name for every op that has it (``triton``), or pairs
(``attention=cpu,scatter=torch``). A forced backend that is not there, or refuses, is an error and never a fallback.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

from blendkv.errors import InputError
from blendkv.kernels import backends

log = logging.getLogger(__name__)

FORCE = "BLENDKV_KERNELS"
IMPLEMENTED: dict[str, tuple[str, ...]] = {
    "attention": ("cuda", "triton", "cpu", "torch", "reference"),
    "mass": ("cuda", "triton", "cpu", "torch", "reference"),
    "scatter": ("cuda", "triton", "cpu", "torch", "reference"),
    "prefill": ("flash", "torch", "reference"),
    "deviation": ("cuda", "triton", "cpu", "torch", "reference"),
    "encode": ("cpu", "torch", "reference"),
}
"""Backends of every op."""
PREFERENCE: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu", "torch"),
    "cuda": ("flash", "triton", "cuda", "torch"),
    "other": ("torch",),
}
"""Backends by device, in the order they are tried. ``reference`` runs only when it is asked for.

Neither GPU backend has been measured: Triton's goes first, because a compiler that is run everywhere makes its code.
"""


class Implementation(Protocol):
    """A module that computes one op."""

    run: Callable[..., Any]
    refuses: Callable[..., str | None]


@dataclass(frozen=True)
class Choice:
    """How one op was computed: the backend, how often, and why better ones were not used."""

    op: str
    backend: str
    calls: int
    passed_over: dict[str, str]


_calls: Counter[tuple[str, str]] = Counter()
_passed_over: dict[tuple[str, str], str] = {}


@lru_cache(maxsize=8)
def _forced(text: str) -> dict[str, str]:
    """Backend by op from the variable's text."""
    chosen: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        op, _, name = part.rpartition("=")
        if name not in backends.NAMES or (op and op not in IMPLEMENTED):
            raise InputError(
                f"{FORCE}={text!r} is not known; allowed: one of {', '.join(backends.NAMES)}, or op=backend pairs with "
                f"the ops {', '.join(IMPLEMENTED)}"
            )
        for each in [op] if op else [o for o, by in IMPLEMENTED.items() if name in by]:
            chosen[each] = name
    return chosen


@lru_cache(maxsize=64)
def _module(op: str, backend: str) -> Implementation:
    return importlib.import_module(f"blendkv.kernels.{op}.{backend}")


def _why_not(op: str, backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if backend not in IMPLEMENTED[op]:
        return f"does not implement {op}"
    return backends.why_not(backend) or _module(op, backend).refuses(*args, **kwargs)


def run(op: str, device: torch.device, *args: Any, **kwargs: Any) -> Any:
    """Compute an op by the best backend that takes its arguments.

    Raises
    ------
    InputError
        If a backend is forced that cannot.
    """
    forced = _forced(os.environ.get(FORCE, "")).get(op)
    if forced is not None:
        reason = _why_not(op, forced, args, kwargs)
        if reason is not None:
            raise InputError(f"{FORCE} forces {forced!r} for {op}, which is not possible here: {reason}; unset it")
        _calls[op, forced] += 1
        return _module(op, forced).run(*args, **kwargs)
    for backend in PREFERENCE.get(device.type, PREFERENCE["other"]):
        reason = _why_not(op, backend, args, kwargs)
        if reason is None:
            _calls[op, backend] += 1
            return _module(op, backend).run(*args, **kwargs)
        if _passed_over.get((op, backend)) != reason:
            _passed_over[op, backend] = reason
            # Without its C++, a CPU is several times slower: that is worth more than a note.
            level = logging.WARNING if backend == "cpu" and backends.why_not("cpu") else logging.INFO
            log.log(level, "%s is not computed by %s here: %s", op, backend, reason)
    raise InputError(f"no backend computes {op} on {device}: {_passed_over.get((op, 'torch'))}")


def survey(device: str) -> dict[str, dict[str, str | None]]:
    """By op, its backends for a device ("cpu", "cuda") in the order they are tried, and why each cannot be used here.

    Arguments that a backend refuses are not known here; the first without a reason is what usually runs.
    """
    order = PREFERENCE.get(device, PREFERENCE["other"])
    return {
        op: {name: backends.why_not(name) for name in order if name in implemented}
        for op, implemented in IMPLEMENTED.items()
    }


def choices() -> list[Choice]:
    """What ran so far in this process, by op and backend."""
    return [
        Choice(op, name, calls, {b: why for (o, b), why in _passed_over.items() if o == op})
        for (op, name), calls in sorted(_calls.items())
    ]

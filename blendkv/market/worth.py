"""What a hit of a stored chunk saves: seconds of prefill, less those of reading it.

Policies compare chunks with each other, so that of these figures only the proportions matter: where chunks of one model
and codec are compared, none; where a chunk takes almost as long to read as to compute, the rate of prefill decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from blendkv.errors import InputError
from blendkv.market.base import Item

PREFILL_RATE = 5000.0
"""Tokens per second that an engine prefills: a small model on a CPU, a large one under load on a GPU."""
READ_RATE = 10e9
"""Bytes per second that are read from memory."""


@dataclass(frozen=True)
class Worth:
    """Turns sizes into what a hit saves.

    Attributes
    ----------
    prefill_rate
        Tokens per second that the engine prefills.
    read_rate
        Bytes per second that are read from memory.

    Raises
    ------
    InputError
        If a rate is not above 0.
    """

    prefill_rate: float = PREFILL_RATE
    read_rate: float = READ_RATE

    def __post_init__(self) -> None:
        for name, rate in (("prefill_rate", self.prefill_rate), ("read_rate", self.read_rate)):
            if not 0.0 < rate < math.inf:
                raise InputError(f"{name} is {rate}; give a number above 0")

    @classmethod
    def at(cls, prefill_rate: float | None) -> Worth:
        """That of an engine that prefills so many tokens per second; None: `PREFILL_RATE`."""
        return cls() if prefill_rate is None else cls(prefill_rate)

    def chunk(self, tokens: int, nbytes: int) -> Item:
        """The item of a chunk KV of ``tokens`` tokens that holds ``nbytes`` bytes."""
        return Item(nbytes, max(0.0, tokens / self.prefill_rate - nbytes / self.read_rate))


def file_item(nbytes: int) -> Item:
    """The item of a chunk file of which only its size is known: all are worth the same per byte."""
    return Item(nbytes, nbytes / READ_RATE)

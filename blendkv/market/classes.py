"""Workload classes: what is believed of how each kind of request comes back, before anything is seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from blendkv.errors import InputError
from blendkv.market.base import UNKNOWN
from blendkv.market.survival import Prior


@dataclass(frozen=True)
class WorkloadClass:
    """A kind of request.

    Attributes
    ----------
    name
        As requests are tagged with it.
    private
        Prior of a block that one session holds: when its next turn comes.
    weight
        How many blocks' worth of evidence the prior is.
    """

    name: str
    private: Prior
    weight: float = 20.0

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 64 or not self.name.isprintable():
            raise InputError(f"workload class {self.name!r}; 1 to 64 printable characters are allowed")
        if self.weight <= 0:
            raise InputError(f"workload class {self.name}: weight {self.weight}; it must be above 0")


AGENT = WorkloadClass("agent", Prior(0.9, 10.0))
CHAT = WorkloadClass("chat", Prior(0.7, 60.0))
RAG = WorkloadClass("rag", Prior(0.1, 120.0, 2.0))
SINGLE = WorkloadClass("single", Prior(0.01, 600.0, 2.0))
UNTAGGED = WorkloadClass(UNKNOWN, Prior(0.4, 60.0, 2.0))
BUILT_IN: tuple[WorkloadClass, ...] = (AGENT, CHAT, RAG, SINGLE, UNTAGGED)


@dataclass(frozen=True)
class Classes:
    """The classes that a market knows; a tag that it does not know counts as untagged."""

    own: tuple[WorkloadClass, ...] = ()
    by_name: Mapping[str, WorkloadClass] = field(init=False)

    def __post_init__(self) -> None:
        names = [known.name for known in self.own]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise InputError(f"workload classes {', '.join(sorted(twice))} are given twice; name each once")
        table = {known.name: known for known in (*BUILT_IN, *self.own)}
        object.__setattr__(self, "by_name", table)

    def get(self, name: str) -> WorkloadClass:
        """The class called ``name``, or that of untagged requests."""
        return self.by_name.get(name) or self.by_name[UNKNOWN]

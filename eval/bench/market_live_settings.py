"""What a live run of the market sends, and how much room there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blendkv.blend import parse_mode
from blendkv.errors import InputError
from blendkv.eval.bench.market_live_load import PER_QUESTION
from blendkv.market.policies import POLICIES

REPORT_SEEDS = (11, 12, 13)
"""Nothing was chosen on these."""


@dataclass(frozen=True)
class LiveSettings:
    """What is sent, and how much room there is.

    Attributes
    ----------
    policies
        Names of `POLICIES`; ratios are to the first.
    seeds
        A round each, every policy in it: in the order given where the seed is odd, else the other way round.
    requests, rate
        Of a round, and how many are sent per second.
    speed
        How much shorter gaps, time-outs and think times are than in the generated trace.
    corpus
        Passages that questions are drawn over.
    words
        Of each passage; 64 are 90 to 130 tokens of SmolLM2's.
    share
        Limit of the memory, and of the disk, as a share of the KV of all passages of the round.
    warm_up
        Share of the requests, from the first on, that fill the store and are not in the figures.
    mode, answer_tokens, threads
        How each request is answered.

    Raises
    ------
    InputError
        If one of them cannot be used.
    """

    policies: Sequence[str] = ("lru", "market")
    seeds: Sequence[int] = REPORT_SEEDS
    requests: int = 60
    rate: float = 0.6
    speed: float = 1.6
    corpus: int = 150
    words: int = 64
    share: float = 0.2
    warm_up: float = 0.2
    mode: str = "blend:head_query@0.05"
    answer_tokens: int = 4
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("requests", "words", "answer_tokens", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is allowed")
        if self.corpus < PER_QUESTION:
            raise InputError(f"corpus is {self.corpus}; at least the {PER_QUESTION} passages of a question are allowed")
        for name in ("rate", "speed"):
            if not 0.0 < getattr(self, name) < 1e6:
                raise InputError(f"{name} is {getattr(self, name)}; a number above 0 is allowed")
        if not 0.0 < self.share <= 1.0:
            raise InputError(f"share is {self.share}; above 0, at most 1 is allowed")
        if not 0.0 <= self.warm_up < 1.0:
            raise InputError(f"warm_up is {self.warm_up}; 0 or more, below 1 is allowed")
        if not self.policies or not self.seeds:
            raise InputError("no policies or no seeds; name at least one of each")
        if len(set(self.policies)) != len(self.policies):
            raise InputError("a policy is named twice; name each once")
        for policy in self.policies:
            POLICIES.get(policy)
        if parse_mode(self.mode).settings is None:
            raise InputError(f"mode {self.mode!r} does not use chunk KV; give blend:SELECTOR@BUDGET or reuse")

    @classmethod
    def quick(cls, **more: Any) -> LiveSettings:
        """A short one: whether it works."""
        return cls(**{"seeds": (1,), "requests": 40, "rate": 4.0, "speed": 12.0, "corpus": 40, "words": 24, **more})

"""What tokens cost: seconds to compute them, seconds to load their KV instead."""

from __future__ import annotations

import math
from dataclasses import dataclass

from blendkv.errors import InputError


@dataclass(frozen=True)
class CostModel:
    """Seconds of one engine with one tier in front of recomputation.

    Attributes
    ----------
    linear
        Seconds per token of prefill: projections and MLPs.
    quadratic
        Seconds per pair of a query token and a key token that it sees: attention.
    load_rate
        Bytes per second from the tier.
    load_latency
        Seconds that a block's load takes on top.
    token_bytes
        Bytes of KV per token.
    blend_budget
        Share of a chunk that is recomputed when its KV is used behind other tokens than it was made for.
    """

    linear: float
    quadratic: float
    load_rate: float
    load_latency: float
    token_bytes: int
    blend_budget: float = 0.05

    def __post_init__(self) -> None:
        for name in ("linear", "load_rate", "token_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; a finite number above 0 is allowed")
        for name in ("quadratic", "load_latency"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; a finite number of 0 or more is allowed")
        if not 0 <= self.blend_budget <= 1:
            raise InputError(f"blend_budget is {self.blend_budget}; a share from 0 to 1 is allowed")

    def prefill(self, start: int, tokens: int) -> float:
        """Seconds to compute ``tokens`` tokens that stand behind ``start`` others.

        linear n + quadratic (n start + n^2 / 2): the costs of neighbouring runs add up to that of both as one.
        """
        return self.linear * tokens + self.quadratic * (tokens * start + tokens * tokens / 2)

    def load(self, tokens: int) -> float:
        """Seconds to load the KV of a block of ``tokens`` tokens."""
        return self.load_latency + tokens * self.token_bytes / self.load_rate

    def saved(self, start: int, tokens: int, blended: bool) -> float:
        """Seconds that a hit saves; 0 where loading takes longer, for then the block is computed.

        ``blended`` says that it is a chunk KV, of which the budget's share is recomputed.
        """
        kept = 1.0 - self.blend_budget if blended else 1.0
        return max(0.0, kept * self.prefill(start, tokens) - self.load(tokens))


def given() -> CostModel:
    """An 8B model in bfloat16 on one GPU with KV in host memory, from public figures and two assumptions.

    Llama-3.1-8B has 32 layers, 8.03e9 weights of which 1.05e9 are embedding tables, and 32 query heads of 128: a
    token's prefill takes 2 x 6.98e9 = 1.40e10 FLOPs, a (query, key) pair 4 x 32 x 4,096 = 5.24e5. An H100 SXM does
    9.89e14 dense bfloat16 FLOPs per second (data sheet), of which prefill is assumed to reach half: 4.95e14. So a token
    takes 1.40e10 / 4.95e14 = 28.2 us, a pair 1.06 ns. KV is 2 x 32 x 8 x 128 x 2 B = 131,072 B per token. PCIe 5.0 x16
    carries 63 GB/s each way, of which copies are assumed to reach 50 GB/s; 20 us are allowed for starting a load.
    """
    flops = 0.5 * 9.89e14
    return CostModel(
        linear=2 * 6.98e9 / flops, quadratic=4 * 32 * 4096 / flops, load_rate=50e9, load_latency=20e-6,
        token_bytes=131_072,
    )  # fmt: skip


def quadratic_fit(short: tuple[int, float], long: tuple[int, float]) -> tuple[float, float]:
    """Linear and quadratic seconds from two prefills, each (tokens, seconds).

    Where the longer one took no more per token than the shorter, attention is too cheap to be seen: quadratic is 0.

    Raises
    ------
    InputError
        If the lengths are not in order, or a time is not above 0.
    """
    (few, quick), (many, slow) = short, long
    if not 0 < few < many or not (quick > 0 and slow > 0):
        raise InputError(
            f"prefills of {few} and {many} tokens in {quick} and {slow} s; give a shorter and a longer one"
        )
    quadratic = max(0.0, 2.0 * (slow / many - quick / few) / (many - few))
    return slow / many - quadratic * many / 2.0, quadratic

"""Four kinds of load, session by session.

Lengths and gaps are chosen, in the range of what public studies of such loads describe; each class says what rests on
one and what does not.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from random import Random
from typing import Protocol

from blendkv.market.base import Use
from blendkv.market.hints import Hint
from blendkv.market.trace import Block, Request, blocks

_FIRST_TOKEN = 0.3
_PER_TOKEN = 0.012
"""Seconds that an answer takes: what times of arrival are made with where no server is simulated."""


class Workload(Protocol):
    """One kind of load."""

    @property
    def turns(self) -> float:
        """Mean number of requests of a session."""

    def session(self, random: Random, name: str, start: float) -> list[Request]:
        """The requests of one session that begins at ``start`` seconds."""

    def describe(self) -> str:
        """One line."""


class Zipf:
    """Ranks 0 to n - 1 with probability in proportion to 1 / (rank + 1)^s."""

    def __init__(self, n: int, s: float = 1.0) -> None:
        self._sums = list(accumulate((rank + 1) ** -s for rank in range(n)))

    def __call__(self, random: Random) -> int:
        """Draw a rank."""
        return bisect_left(self._sums, random.random() * self._sums[-1])


@cache
def _zipf(n: int) -> Zipf:
    return Zipf(n)


def lognormal(random: Random, median: float, sigma: float, most: float = math.inf) -> float:
    """A log-normal value, capped."""
    return min(most, random.lognormvariate(math.log(median), sigma))


def _answer(output: int) -> float:
    return _FIRST_TOKEN + _PER_TOKEN * output


@dataclass(frozen=True)
class Tool:
    """One kind of tool: its share of the calls, seconds that a call takes (log-normal), and its timeout in seconds."""

    name: str
    share: float
    median: float
    timeout: float
    sigma: float = 0.7


TOOLS = (
    Tool("reads and searches", 0.4, 2.0, 10.0),
    Tool("commands and scripts", 0.4, 10.0, 60.0),
    Tool("tests and builds", 0.2, 60.0, 600.0),
)


@dataclass(frozen=True)
class Agents:
    """Agent loops: a system prompt with tools that all agents of a type share, a task, then turn after tool's result.

    Lengths are chosen: a loop of a dozen or two dozen steps, each with a tool's result of some hundred tokens. Many
    tool calls are over long before a person would have answered, and how long they take varies (Continuum, Li et al.
    2025); the three kinds of tool and their times are chosen. With each call the session says that a tool works, with
    that tool's timeout, which some calls exceed.
    """

    types: int = 6
    steps: tuple[int, int] = (8, 25)
    tools: tuple[Tool, ...] = TOOLS
    says_end: float = 0.7
    turns: float = 16.5
    _shared: list[tuple[Block, ...]] = field(default_factory=list, init=False, repr=False)

    def session(self, random: Random, name: str, start: float) -> list[Request]:
        """One task."""
        if not self._shared:
            self._shared.extend(blocks(f"agent-type-{n}", random.randint(3000, 6000)) for n in range(self.types))
        use = Use("agent", name)
        history = self._shared[_zipf(self.types)(random)]
        steps = random.randint(*self.steps)
        made: list[Request] = []
        now, gap = start, 0.0
        for step in range(steps):
            fresh = random.randint(200, 1500) if step else random.randint(200, 2000)
            output = round(lognormal(random, 120, 0.8, 2000)) + 1
            own = blocks(f"{name}/{step}", fresh + output)
            last = step == steps - 1
            ends = last and random.random() < self.says_end
            hint: Hint | None = "tool_started" if not last else "session_ended" if ends else None
            (tool,) = random.choices(self.tools, [known.share for known in self.tools])
            ttl = 0.0 if last else tool.timeout
            made.append(Request(now, use, history, (), fresh, output, own, gap, hint, ttl))
            history += own
            gap = lognormal(random, tool.median, tool.sigma)
            now += _answer(output) + gap
        return made

    def describe(self) -> str:
        """One line."""
        return (
            f"{self.types} agent types with 3,000-6,000 shared tokens, {self.steps[0]}-{self.steps[1]} turns of "
            f"200-1,500 new tokens, a hint with each tool call ("
            + ", ".join(f"{t.share:.0%} {t.name}, median {t.median:g} s, timeout {t.timeout:g} s" for t in self.tools)
            + f"), {self.says_end:.0%} say that they end"
        )


@dataclass(frozen=True)
class Chats:
    """Chat: a shared system prompt, then messages and answers, with time to think between them.

    WildChat (Zhao et al. 2024: 1 million chats, over 2.5 million turns) has 2.5 turns in the mean; a product that keeps
    its users has more, and 5 is chosen. So are the lengths (messages of 150 tokens in the median, answers of 330) and
    the time to think. That kinds of requests differ in when their KV is used again, and each by itself is predictable,
    is from a large provider's traces (Wang et al. 2025, KVCache in the wild).
    """

    prompts: int = 4
    turns: float = 5.0
    think: float = 60.0
    think_sigma: float = 1.0
    says_end: float = 0.2
    _shared: list[tuple[Block, ...]] = field(default_factory=list, init=False, repr=False)

    def session(self, random: Random, name: str, start: float) -> list[Request]:
        """One conversation."""
        if not self._shared:
            self._shared.extend(blocks(f"chat-system-{n}", random.randint(200, 1500)) for n in range(self.prompts))
        use = Use("chat", name)
        history = self._shared[_zipf(self.prompts)(random)]
        made: list[Request] = []
        now, gap = start, 0.0
        last = False
        while not last:
            last = random.random() < 1.0 / self.turns
            fresh = round(lognormal(random, 150, 1.1, 8000)) + 1
            output = round(lognormal(random, 330, 0.7, 4000)) + 1
            own = blocks(f"{name}/{len(made)}", fresh + output)
            hint: Hint | None = "session_ended" if last and random.random() < self.says_end else None
            made.append(Request(now, use, history, (), fresh, output, own, gap, hint))
            history += own
            gap = lognormal(random, self.think, self.think_sigma)
            now += _answer(output) + gap
        return made

    def describe(self) -> str:
        """One line."""
        return (
            f"{self.prompts} system prompts of 200-1,500 tokens, {self.turns:g} turns in the mean (geometric), think "
            f"time with a median of {self.think:g} s, {self.says_end:.0%} say that they end"
        )


@dataclass(frozen=True)
class Corpora:
    """RAG: a corpus's system prompt, 6 of its chunks in the order of that request, a question.

    That a few documents take most retrievals is RAGCache's finding (Jin et al. 2024). Zipf's law with exponent 1, under
    which 3 % of 1,500 chunks take 56 % of the draws, is chosen for it, as are the sizes. ``drift`` chunks leave the
    head of every corpus's ranking each ``drift_every`` seconds, and others come up behind them.
    """

    corpora: int = 4
    chunks: int = 1500
    per_request: int = 6
    drift: int = 0
    drift_every: float = 60.0
    turns: float = 1.0
    _made: list[tuple[tuple[Block, ...], list[Block]]] = field(default_factory=list, init=False, repr=False)

    def session(self, random: Random, name: str, start: float) -> list[Request]:
        """One question."""
        at = _zipf(self.corpora)(random)
        law = _zipf(self.chunks)
        turned = self.drift * math.floor(start / self.drift_every)
        ranks: dict[int, None] = {}
        while len(ranks) < self.per_request:
            ranks[law(random)] = None
        chosen = [(rank + turned) % self.chunks for rank in ranks]
        random.shuffle(chosen)
        return [self.ask(random, at, chosen, start)]

    def ask(self, random: Random, corpus: int, chunks: Sequence[int], start: float) -> Request:
        """One question over chunks of a corpus, by their numbers."""
        prefix, held = self._contents(random)[corpus]
        fresh = round(lognormal(random, 40, 0.7, 1000)) + 1
        output = round(lognormal(random, 130, 0.8, 2000)) + 1
        return Request(start, Use("rag"), prefix, tuple(held[n] for n in chunks), fresh, output)

    def _contents(self, random: Random) -> list[tuple[tuple[Block, ...], list[Block]]]:
        if not self._made:
            for n in range(self.corpora):
                held = [Block(f"corpus-{n}/{m}", random.randint(320, 480)) for m in range(self.chunks)]
                self._made.append((blocks(f"corpus-{n}-system", random.randint(300, 1200)), held))
        return self._made

    def describe(self) -> str:
        """One line."""
        moves = f", {self.drift} chunks of each leave the head every {self.drift_every:g} s" if self.drift else ""
        return (
            f"{self.corpora} corpora of {self.chunks} chunks of 320-480 tokens, {self.per_request} a request by Zipf's "
            f"law in any order{moves}"
        )


@dataclass(frozen=True)
class Singles:
    """Single shots: a template's prefix and a prompt that never comes again, as in API traffic and batch jobs.

    Lengths are chosen: log-uniform, so that a short question and a long document are about as frequent (the median is
    1,700 tokens).
    """

    templates: int = 8
    shortest: int = 500
    longest: int = 6000
    turns: float = 1.0
    _shared: list[tuple[Block, ...]] = field(default_factory=list, init=False, repr=False)

    def session(self, random: Random, name: str, start: float) -> list[Request]:
        """One request."""
        if not self._shared:
            self._shared.extend(blocks(f"template-{n}", random.randint(100, 800)) for n in range(self.templates))
        prefix = self._shared[_zipf(self.templates)(random)]
        fresh = round(math.exp(random.uniform(math.log(self.shortest), math.log(self.longest))))
        output = round(lognormal(random, 150, 0.9, 2000)) + 1
        return [Request(start, Use("single"), prefix, (), fresh, output, blocks(name, fresh + output))]

    def describe(self) -> str:
        """One line."""
        return (
            f"{self.templates} templates of 100-800 tokens, unique prompts of {self.shortest}-{self.longest:,} tokens"
        )

"""Requests as data: what each asks for, block by block, and when; and the reader of Mooncake's traces."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from blendkv.errors import InputError
from blendkv.market.base import UNKNOWN, Use
from blendkv.market.hints import Hint

BLOCK = 512
"""Tokens of a prefix block, as in Mooncake's traces; the last one of a turn may have fewer."""


_APART = 1e-6


class Block(NamedTuple):
    """A run of tokens whose KV is kept as one piece: equal key, equal KV."""

    key: str
    tokens: int


class Request(NamedTuple):
    """One prompt: its prefix, its chunks, then fresh tokens.

    Attributes
    ----------
    arrival
        Seconds since the trace began.
    use
        Workload class and session.
    prefix
        Blocks from position 0, usable only as an unbroken run, as in vLLM's prefix cache.
    chunks
        Chunk KVs behind the prefix, each usable wherever it stands (non-prefix hits).
    fresh
        Tokens behind those that are always computed: the question, a user's message, a tool's result.
    output
        Tokens of the answer.
    made
        Blocks that the fresh tokens and the answer become, behind the prefix: what the session's next turn asks for.
        Empty where there are chunks: what follows blended KV never enters a prefix cache.
    gap
        Seconds from the end of the session's last answer to this request; 0 for a first turn.
    hint, ttl
        What the session says of itself once the answer is given: a tool works for it, for ``ttl`` seconds at most, or
        it is over. None if it says nothing.
    """

    arrival: float
    use: Use
    prefix: tuple[Block, ...] = ()
    chunks: tuple[Block, ...] = ()
    fresh: int = 0
    output: int = 0
    made: tuple[Block, ...] = ()
    gap: float = 0.0
    hint: Hint | None = None
    ttl: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(b.tokens for b in self.prefix) + sum(b.tokens for b in self.chunks) + self.fresh


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes
    ----------
    name
        As tables show it.
    requests
        By arrival.
    about
        One line on where it is from.
    """

    name: str
    requests: Sequence[Request]
    about: str = ""

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    @cached_property
    def distinct_tokens(self) -> int:
        """Tokens of all distinct blocks, asked for or made: what a cache would hold that forgets nothing."""
        return sum(self._sizes().values())

    @cached_property
    def span(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival - self.requests[0].arrival if self.requests else 0.0

    def uses(self) -> list[tuple[float, str]]:
        """Every (seconds, key) that is asked for or made, in order: the future that Belady's policy is given.

        Blocks of one request come from its end to its begin, as a cache is told of them.
        """
        return [
            (request.arrival, block.key)
            for request in self.requests
            for block in reversed((*request.prefix, *request.chunks, *request.made))
        ]

    def check(self) -> Trace:
        """Return the trace itself if it can be replayed.

        Raises
        ------
        InputError
            If it is empty, not in order, or a request or block cannot be.
        """
        if not self.requests:
            raise InputError(f"trace {self.name} has no request; give one with at least one")
        last = -math.inf
        for number, request in enumerate(self.requests):
            if not last <= request.arrival < math.inf:
                raise InputError(
                    f"trace {self.name}: request {number} arrives at {request.arrival} s, after one at {last} s; "
                    "sort the requests by finite arrival times"
                )
            last = request.arrival
            if request.chunks and request.made:
                raise InputError(
                    f"trace {self.name}: request {number} has chunks and makes prefix blocks; allowed: one"
                )
            if min(request.fresh, request.output, request.gap, request.ttl) < 0 or request.tokens < 1:
                raise InputError(f"trace {self.name}: request {number} has no tokens, or fewer than 0 of something")
        self._sizes()
        return self

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for request in self.requests:
            for block in (*request.prefix, *request.chunks, *request.made):
                if block.tokens < 1 or sizes.setdefault(block.key, block.tokens) != block.tokens:
                    raise InputError(
                        f"trace {self.name}: block {block.key} has {block.tokens} tokens, and "
                        f"{sizes.get(block.key)} elsewhere; a key stands for the same 1 or more tokens everywhere"
                    )
        return sizes


def blocks(name: str, tokens: int) -> tuple[Block, ...]:
    """Cut ``tokens`` tokens into blocks of `BLOCK` tokens, the last one smaller perhaps; keys begin with ``name``."""
    return tuple(Block(f"{name}/{start // BLOCK}", min(BLOCK, tokens - start)) for start in range(0, tokens, BLOCK))


def read_mooncake(path: Path, limit: int | None = None) -> Trace:
    """Read a trace in the format of Mooncake's (Qin et al., FAST 2025): a JSON object per line.

    Its fields are ``timestamp`` (milliseconds), ``input_length``, ``output_length`` and ``hash_ids``, one per block of
    512 tokens. An id stands for the block and all before it, so the blocks are a prefix; the last may be smaller. The
    format knows neither classes nor sessions: uses are untagged, and the KV of answers is not in it. Requests of one
    timestamp, of which there are many, are put a microsecond apart: uses at one time have no order.

    Parameters
    ----------
    path
        The file.
    limit
        Requests to read at most.

    Raises
    ------
    InputError
        If the file cannot be read, or a line is not in this format; the message names the line.
    """
    requests: list[Request] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if line.strip():
                    requests.append(_mooncake_request(path, number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"trace {path} cannot be read: {error}; give a file of JSON lines") from None
    requests.sort(key=lambda request: request.arrival)
    for at in range(1, len(requests)):
        earliest = requests[at - 1].arrival + _APART
        if requests[at].arrival < earliest:
            requests[at] = requests[at]._replace(arrival=earliest)
    about = f"{path.name}: {len(requests)} requests in Mooncake's format, blocks of {BLOCK} tokens, untagged"
    return Trace(path.stem, tuple(requests), about).check()


def _mooncake_request(path: Path, number: int, line: str) -> Request:
    try:
        row: dict[str, Any] = json.loads(line)
        ids, length = [int(i) for i in row["hash_ids"]], int(row["input_length"])
        arrival, output = float(row["timestamp"]) / 1000.0, int(row["output_length"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}, line {number}: {type(error).__name__} {error}; a line is an object with timestamp, input_length, "
            "output_length and hash_ids"
        ) from None
    if len(ids) != -(-length // BLOCK) or output < 0:
        raise InputError(
            f"{path}, line {number}: {length} input tokens with {len(ids)} blocks, {output} output tokens; allowed: "
            f"a block for every {BLOCK} tokens begun, 0 or more output tokens"
        )
    last = len(ids) - 1
    prefix = tuple(Block(f"m{i}", BLOCK if at < last else length - BLOCK * last) for at, i in enumerate(ids))
    return Request(arrival, Use(UNKNOWN), prefix, output=output)

"""What a prefix's earlier blocks owe the later ones: they are worth no less than what is of no use without them."""

from __future__ import annotations


class Chains:
    """The worth of held blocks, that of a block lifted to the highest worth among those after it.

    Blocks are told of from the end of a prefix to its begin, as engines do; so what a block is lifted to is known when
    it is told of. A block's lift is forgotten once nothing that is held needs it. O(1) per call; memory is bounded by
    the blocks held.
    """

    def __init__(self) -> None:
        self._after: dict[str, str] = {}
        self._lifts: dict[str, tuple[int, float]] = {}

    def lift(self, key: str, after: str, worth: float) -> float:
        """The worth of a held block, given its own; ``after`` is the key of the one before it, empty for none."""
        if self._after.get(key, "") != after:
            self.leave(key)
        if key in self._lifts:
            worth = max(worth, self._lifts[key][1])
        if after:
            count, floor = self._lifts.get(after, (0, worth))
            self._lifts[after] = (count if key in self._after else count + 1, max(floor, worth))
            self._after[key] = after
        return worth

    def leave(self, key: str) -> None:
        """``key`` is not held any more."""
        after = self._after.pop(key, "")
        if after:
            count, floor = self._lifts.pop(after)
            if count > 1:
                self._lifts[after] = (count - 1, floor)

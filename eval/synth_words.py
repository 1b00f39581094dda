"""Names that exist nowhere, and prose that states nothing: what generated documents are made of."""

from __future__ import annotations

import random
from collections.abc import Callable

_BEGINNINGS = (
    "bel", "cor", "dra", "fen", "gal", "hol", "jas", "kel", "lum", "mor", "nal", "pra", "quin", "ras", "sel", "tor",
    "vel", "wyn", "yar", "zen", "bran", "cal", "dun", "fal", "har", "kor", "lan", "mir", "par", "sur", "ald", "bor",
    "cre", "dor", "erl", "fro", "gwen", "hal", "isk", "jor", "kas", "lor", "mel", "ner", "ost", "pel", "ril", "sar",
    "tam", "ulv", "ver", "wil", "yor", "zan", "ark", "bru", "cas", "del", "eri", "far", "gor", "hel", "jun", "kil",
)  # fmt: skip
_ENDS = (
    "dor", "len", "mar", "nis", "ra", "rin", "sk", "thal", "von", "wick", "bar", "tis", "lo", "gust", "an", "eth",
    "ia", "os", "ul", "en", "da", "mund", "ric", "sa", "to", "vyn", "bert", "ga", "li", "nor", "pa", "rus", "tan",
    "va", "zo", "del", "ka", "mir", "no", "sta",
)  # fmt: skip

_ADJECTIVES = (
    "silver", "green", "golden", "quiet", "tall", "bright", "red", "gentle", "hollow", "broken", "frozen", "hidden",
    "crooked", "blue", "brown", "proud", "swift", "grey", "lonely", "striped", "painted", "sleeping", "dark", "round",
)  # fmt: skip
_ANIMALS = (
    "fox", "owl", "bear", "heron", "wolf", "otter", "raven", "badger", "hare", "falcon", "stag", "swan", "lynx", "crow",
    "beetle", "salmon", "turtle", "spider", "eagle", "ferret", "hound", "lizard", "goose", "viper",
)  # fmt: skip
_PLACES = (
    "falls", "meadow", "harbour", "ridge", "valley", "springs", "forest", "cliffs", "marsh", "island", "canyon", "bay",
    "gorge", "lagoon", "plain", "glacier", "dunes", "rapids", "grove", "caves", "summit", "delta", "heath", "fjord",
)  # fmt: skip
_THINGS = (
    "candles", "hammers", "feathers", "ladders", "bottles", "anchors", "mirrors", "needles", "blankets", "trumpets",
    "compasses", "barrels", "carpets", "umbrellas", "spoons", "violins", "helmets", "pillows", "saddles", "drums",
    "kites", "ribbons", "shovels", "whistles",
)  # fmt: skip

_WHO = (
    "an old miller", "a young baker", "two travelling singers", "the night watch", "a family of weavers",
    "a patient gardener", "the children from the upper street", "a retired teacher", "some fishermen",
    "a tall carpenter", "three neighbours", "a visiting painter", "the ferryman", "a group of students",
    "a careful clockmaker", "an honest merchant",
)  # fmt: skip
_DOES = (
    "carried baskets of apples", "repaired a wooden gate", "told long stories", "played cards", "sold warm bread",
    "counted the boats", "drank strong tea", "swept the stairs", "hung lanterns", "looked for a lost dog",
    "planted rows of beans", "waited for the mail", "sang an old song", "cleaned copper pots", "watched the clouds",
    "painted a fence", "stacked firewood", "shared a simple meal",
)  # fmt: skip
_WHERE = (
    "along the quiet road", "behind the market", "under the lime trees", "beside the stone well",
    "near the wide bridge", "in a narrow courtyard", "at the edge of the field", "by the garden wall",
    "in front of the bakery", "on the low hill", "inside the warm kitchen", "next to the empty stable",
    "close to the orchard", "in the shade of the tower",
)  # fmt: skip
_WHEN = (
    "before the first rain of spring", "on most evenings", "when the bells fell silent", "until the lamps went out",
    "in the early morning", "after a long winter", "during the harvest", "while the wind was calm",
    "on the last day of the week", "shortly after noon", "when nobody was looking", "at the end of the summer",
)  # fmt: skip


class Names:
    """Names of one item: none comes twice, and their parts come again only when all of them are used.

    No made-up word is an English one or stands in the prose, and neither do the words of names that are English.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._taken: set[str] = set()
        self._left: dict[tuple[str, ...], list[str]] = {}

    def word(self) -> str:
        """A name of one made-up word."""
        return self._unique(lambda: (self._next(_BEGINNINGS) + self._rng.choice(_ENDS)).capitalize())

    def person(self) -> str:
        """A person's name, such as "Erili Yarga the Silver Fox"."""
        first, last = self.word(), self.word()
        return self._unique(lambda: f"{first} {last} the {self._both(_ANIMALS).title()}")

    def place(self) -> str:
        """The name of a place, such as "Koria Silver Falls"."""
        first = self.word()
        return self._unique(lambda: f"{first} {self._both(_PLACES).title()}")

    def motto(self) -> str:
        """Words that belong together by chance, such as "silver candles and green hammers"."""
        return self._unique(lambda: f"{self._both(_THINGS)} and {self._both(_THINGS)}")

    def _both(self, nouns: tuple[str, ...]) -> str:
        return f"{self._next(_ADJECTIVES)} {self._next(nouns)}"

    def _next(self, pool: tuple[str, ...]) -> str:
        left = self._left.setdefault(pool, [])
        if not left:
            left += self._rng.sample(pool, len(pool))
        return left.pop()

    def _unique(self, make: Callable[[], str]) -> str:
        while (name := make()) in self._taken:
            pass
        self._taken.add(name)
        return name


class Prose:
    """Sentences about nobody by name; no sentence comes twice in an item."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._said: set[str] = set()

    def sentences(self, words: int) -> list[str]:
        """Sentences of ``words`` words together, or a few more."""
        found: list[str] = []
        while sum(len(s.split()) for s in found) < words:
            found.append(self._sentence())
        return found

    def _sentence(self) -> str:
        while True:
            who, does, where, when = (self._rng.choice(pool) for pool in (_WHO, _DOES, _WHERE, _WHEN))
            order = self._rng.choice((f"{who} {does} {where} {when}", f"{when}, {who} {does} {where}"))
            sentence = f"{order[0].upper()}{order[1:]}."
            if sentence not in self._said:
                self._said.add(sentence)
                return sentence

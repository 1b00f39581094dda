"""A typed name -> thing table with errors that list what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from blendkv.errors import InputError

T = TypeVar("T")


class Registry(Generic[T]):
    """Things of one kind by name, in the order they were added."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def add(self, name: str) -> Callable[[T], T]:
        """Return a decorator that files its argument under ``name``; a name is taken once.

        Raises
        ------
        InputError
            If the name is taken.
        """

        def register(item: T) -> T:
            if name in self._items:
                raise InputError(f"{self.kind} {name!r} is registered already; choose another name")
            self._items[name] = item
            return item

        return register

    def get(self, name: str) -> T:
        """Return the thing called ``name``.

        Raises
        ------
        InputError
            If there is none; the message lists the names.
        """
        try:
            return self._items[name]
        except KeyError:
            raise InputError(f"unknown {self.kind} {name!r}; allowed: {', '.join(self._items)}") from None

    def names(self) -> tuple[str, ...]:
        """All names, in the order they were added."""
        return tuple(self._items)

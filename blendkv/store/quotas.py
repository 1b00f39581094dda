"""How many bytes each tenant may have in a local tier."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from blendkv.config import parse_bytes
from blendkv.errors import InputError
from blendkv.tenants import tenant_tag


@dataclass(frozen=True)
class Quotas:
    """Limits in bytes by tenant, for memory and disk each. Chunks of no tenant have none.

    Attributes
    ----------
    limits
        By the tenant's tag.
    others
        Of every tenant that is not among them; None: no limit.
    names
        The tenants' names by tag, as far as they are known.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    others: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for limit in (*self.limits.values(), *(() if self.others is None else (self.others,))):
            if limit < 0:
                raise InputError(f"a quota of {limit} bytes; give 0 or more")

    @classmethod
    def parse(cls, given: Sequence[str], others: str | None = None, environ: Mapping[str, str] = os.environ) -> Quotas:
        """Read ``NAME=BYTES`` pairs, such as ``acme=10GB``, and the limit of all other tenants.

        Raises
        ------
        InputError
            If one is none, a name comes twice, or the salt that makes tags of names is missing.
        """
        limits: dict[str, int] = {}
        names: dict[str, str] = {}
        for pair in given:
            name, sign, size = pair.partition("=")
            if not sign:
                raise InputError(f"quota {pair!r} is not NAME=BYTES; give for instance acme=10GB")
            tag = tenant_tag(name, environ)
            if tag in limits:
                raise InputError(f"tenant {name!r} has two quotas; give one")
            limits[tag], names[tag] = parse_bytes(size), name
        return cls(limits, None if others is None else parse_bytes(others), names)

    def of(self, tag: str) -> int | None:
        """The limit of a tenant; None if it has none."""
        return self.limits.get(tag, self.others) if tag else None

    def called(self, tag: str) -> str:
        """The tenant's name, or the first digits of its tag."""
        return self.names.get(tag, tag[:12])

    def refusal(self, tag: str, size: int, kept: int) -> str:
        """Why ``size`` bytes do not fit beside the ``kept`` bytes that cannot leave: for an error."""
        return (
            f"a chunk KV of {size} bytes does not fit in the quota of tenant {self.called(tag)}: {self.of(tag)} bytes, "
            f"{kept} of them pinned or in use; raise the quota or unpin some"
        )

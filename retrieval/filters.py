"""Metadata filters: ``where={"title": "x", "year": [2024, 2025]}`` as SQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from blendkv.errors import InputError

Where = Mapping[str, Any]
"""Field -> a scalar it must equal, or a list, tuple or set of scalars of which it must equal one."""


def where_sql(where: Where) -> tuple[str, list[Any]]:
    """Return a condition on ``chunks AS c`` and ``documents AS d``, and its values.

    A chunk's field goes before its document's; a missing field is equal to None.

    Raises
    ------
    InputError
        If a field is no string, or a value neither scalar nor a list of scalars.
    """
    parts: list[str] = []
    values: list[Any] = []
    for field, wanted in where.items():
        if not isinstance(field, str) or '"' in field:
            raise InputError(
                f"filter field {field!r}; a string without double quotes is allowed: name a metadata field"
            )
        options = list(wanted) if isinstance(wanted, Sequence | Set) and not isinstance(wanted, str) else [wanted]
        for option in options:
            if not (option is None or isinstance(option, str | int | float)):
                raise InputError(
                    f"filter {field!r} is {type(option).__name__}; a string, number, bool or None, or a list of these, "
                    "is allowed"
                )
        path = f'$."{field}"'
        found = "coalesce(json_extract(c.metadata, ?), json_extract(d.metadata, ?))"
        parts.append("(" + " OR ".join([f"{found} IS ?"] * len(options)) + ")" if options else "0")
        for option in options:
            values += [path, path, option]
    return " AND ".join(parts) or "1", values

"""Rows of ``name, value, unit, baseline, ratio``, and the problems that take a figure away."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass
class Rows:
    """Collects rows; a figure whose check failed becomes None, with a line in ``problems``."""

    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        baseline: str | None = None,
        ratio: float | None = None,
        *,
        wrong: str | None = None,
    ) -> None:
        """Add a row; ``wrong`` says why there is no figure."""
        if wrong is not None:
            self.problems.append(f"{name}: {wrong}")
        shown = None if wrong is not None else value
        ratio = None if wrong is not None else ratio
        self.rows.append({"name": name, "value": shown, "unit": unit, "baseline": baseline, "ratio": ratio})

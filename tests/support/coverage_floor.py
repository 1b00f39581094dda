"""Fail when a room's line coverage falls below its floor. Reads .coverage in the current folder."""

from __future__ import annotations

import sys

from coverage import Coverage

FLOORS = {
    "blend": 92.0,
    "kernels": 92.0,
    "store": 92.0,
    "retrieval": 92.0,
    "engines": 90.0,
    "cli": 90.0,
    "eval": 90.0,
    "daemon": 92.0,
    "market": 92.0,
    "observe": 90.0,
}


def main() -> int:
    data = Coverage()
    data.load()
    below = False
    for room, floor in FLOORS.items():
        lines = missed = 0
        for path in data.get_data().measured_files():
            if f"/{room}/" in path and "/tests/" not in path:
                _, statements, _, missing, _ = data.analysis2(path)
                lines, missed = lines + len(statements), missed + len(missing)
        share = 100.0 * (lines - missed) / lines if lines else 0.0
        below |= share < floor
        print(f"coverage of {room}: {share:.1f} % of {lines} lines (at least {floor:.0f} %)")
    return int(below)


if __name__ == "__main__":
    sys.exit(main())

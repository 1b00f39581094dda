"""The crash run in short; `make soak` is the long one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).with_name("soak.py")


def test_kills_and_stops_under_load_break_nothing():
    command = [sys.executable, str(SOAK), "--points", "12", "--per-round", "6", "--limits", "none,device"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    lines = (line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith(" "))
    counts = {what: int(count) for count, what in lines}
    assert min(counts[f"{kind} served"] for kind in ("engine", "putter", "ingest")) > 0
    if "left out" not in done.stdout:
        assert counts["filled: evicted from disk for full"] > 0

"""``make device-check``: the GPU kernels on the GPU that is there, first their results, then their speed; 8 minutes.

Prints the card and versions, compiles, runs the numerics tests of both GPU backends, and measures only what passed.
Without a GPU it runs what the CPU allows (compiles, and the tests on the emulated GPU), and says that nothing was
measured. With ``OUT`` set, the rows are written to ``$OUT/device.json``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import blendkv
from blendkv.errors import BlendKVError
from blendkv.eval.bench import device_blend, device_kernels, device_memory
from blendkv.eval.bench.device_kernels import Plan
from blendkv.eval.environment import environment
from blendkv.kernels import build, testing

LIMIT = 420.0
"""Seconds after which nothing new is started."""
TESTS = {
    "cuda": ("tests/kernels/test_cuda.py", "gpu and not emulated"),
    "triton": ("tests/kernels/test_triton.py", "not compile"),
}
"""By backend: the numerics tests, and which of them run on a GPU."""
EMULATED = ("tests/kernels/test_cuda.py", "emulated and head_dims")
"""What runs without a GPU."""
MOST_TEST_SECONDS = 150
WORKERS = min(8, (os.cpu_count() or 1) // 2)
"""Processes of the tests: Triton compiles a kernel per shape and dtype, which takes most of their time."""


class Check:
    """One run of the script."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.root = Path(blendkv.__file__).resolve().parent.parent
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start, at once."""
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def note(self, text: str) -> None:
        """Print a line that the report repeats at its end."""
        self.notes.append(text)
        self.say(text)

    def compile(self) -> bool:
        """Compile the CUDA library; whether there is one."""
        began = time.monotonic()
        reason = build.why_not("cuda")
        took = time.monotonic() - began
        self.note(f"cuda library: {f'ready after {took:.0f} s' if reason is None else reason}")
        return reason is None

    def tests(self, name: str, file: str, chosen: str) -> bool:
        """Run tests by pytest, in a process whose path holds no bare ``kernels``; whether they passed."""
        if not (self.root / file).is_file():
            self.note(f"{name}: {file} is not here; the script runs in a checkout")
            return False
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "blendkv").symlink_to(self.root / "blendkv")
            (Path(folder) / "pytest.ini").write_text("[pytest]\n")
            command = [
                sys.executable, "-P", "-m", "pytest", "-q", "-x", "--noconftest", "--import-mode=importlib",
                "-p", "no:cacheprovider", "-c", f"{folder}/pytest.ini", f"--rootdir={self.root}", "-k", chosen,
                str(self.root / file),
            ]  # fmt: skip
            if WORKERS > 1 and importlib.util.find_spec("xdist") is not None:
                command += ["-n", str(WORKERS)]
            path = os.pathsep.join([folder, str(self.root / "tests" / "support")])
            try:
                done = subprocess.run(
                    command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
                    timeout=MOST_TEST_SECONDS, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                self.note(f"{name} numerics: not done after {MOST_TEST_SECONDS} s")
                return False
        last = done.stdout.strip().splitlines()[-1:] or done.stderr.strip().splitlines()[-1:]
        if done.returncode != 0:
            print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
        self.note(f"{name} numerics: {'green' if done.returncode == 0 else 'RED'}, {''.join(last)}")
        return done.returncode == 0

    def measure(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Collect rows until the time is up; an error ends this part alone, and makes the check red."""
        try:
            with torch.inference_mode():
                for row in rows:
                    self.rows.append(row)
                    self.say(line(row))
                    if time.monotonic() - self.began > LIMIT:
                        self.note(f"{name}: cut short, {LIMIT:.0f} s are over")
                        return
        except (BlendKVError, RuntimeError) as error:
            self.note(f"{name}: FAILED, {error}")
        torch.cuda.empty_cache()

    def late(self, name: str) -> bool:
        """Whether it is too late to start something."""
        if time.monotonic() - self.began < LIMIT:
            return False
        self.note(f"{name}: not started, {LIMIT:.0f} s are over")
        return True

    @property
    def red(self) -> bool:
        """Whether something failed."""
        return any(word in note for note in self.notes for word in ("RED", "FAILED", "not done", "cannot"))


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    text = f"{row['what']:<44} {row['ours']:<7} {row['ms']:9.3f} ms"
    if "rate" in row:
        text += (
            f"  {row['rate']:8.1f} {row['unit']:<7}  {row['ratio']:6.2f} x {row['theirs']} ({row['their_rate']:.0f})"
        )
    if "speed_up" in row:
        text += f"  {row['speed_up']:6.2f} x faster than {row['theirs']}"
    return text


def _on_gpu(check: Check) -> None:
    green = [name for name, (file, chosen) in TESTS.items() if check.tests(name, file, chosen)]
    if not green:
        check.note("nothing was measured: no backend passed")
        return
    plan = Plan()
    copied = device_kernels.copy_rate(plan)
    check.note(f"copy: {copied / 1e9:.0f} GB/s, read and written bytes counted")
    check.measure("attention", device_kernels.attention_rows(plan, green))
    check.measure("mass", device_kernels.mass_rows(plan, green, copied))
    check.measure("scatter", device_kernels.scatter_rows(plan, green, copied))
    check.measure("pinned memory", device_memory.memory_rows(plan, device_memory.MemoryPlan(), torch.cuda.cudart()))
    if not check.late("blend"):
        check.measure("blend", _blends(check, plan, green))


def _blends(check: Check, plan: Plan, green: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Measure the blends by those backends whose blend at budget 1 is full prefill, to twice plain torch's rounding."""
    found = {}
    for name in ("torch", *green):
        with testing.forced(name):
            found[name] = device_blend.check_blend(device_blend.LLAMA_8B, plan.device, torch.bfloat16)
    allowed = 2 * found["torch"]["budget 1"]
    right = [name for name in green if found[name]["budget 1"] <= allowed < found[name]["budget 0"]]
    for name in green:
        colour = "green" if name in right else "RED"
        check.note(
            f"{name} blend of two layers: {colour}, relative difference of logits to full prefill "
            f"{found[name]['budget 1']:.4f} at budget 1, {found[name]['budget 0']:.4f} at 0 (allowed {allowed:.4f})"
        )
    if right:
        yield from device_blend.blend_rows(plan, device_blend.BlendPlan(), right, torch.bfloat16)


def _describe(check: Check) -> dict[str, Any]:
    facts = environment()
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        asked = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        facts |= {"driver": driver, "multiprocessors": card.multi_processor_count, "cuda": torch.version.cuda}
    check.say(", ".join(f"{name} {value}" for name, value in facts.items() if value is not None))
    return facts


def main() -> int:
    """Run the check; 1 if something is red."""
    check = Check()
    facts = _describe(check)
    compiled = check.compile()
    if torch.cuda.is_available():
        _on_gpu(check)
    else:
        check.tests("cuda, emulated", *EMULATED)
        check.note("there is no GPU: nothing was measured")
    print("\n" + "\n".join([*map(line, check.rows), *check.notes]), flush=True)
    folder = os.environ.get("OUT")
    if folder:
        report = {"environment": facts, "rows": check.rows, "notes": check.notes, "red": check.red}
        (Path(folder) / "device.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 1 if check.red or (torch.cuda.is_available() and not compiled) else 0


if __name__ == "__main__":
    sys.exit(main())

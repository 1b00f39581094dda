"""What all commands share: JSON objects, tables, progress bars, one line per error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from blendkv import __version__

out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
err = Console(stderr=True, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Codec = Annotated[
    str | None,
    typer.Option(help="How chunk KVs are stored: raw, fp8, int8, turbo4, turbo3 or turbo2; see docs/codecs.md."),
]
Store = Annotated[str, typer.Option("--store", help="Folder of the store.")]
Memory = Annotated[str, typer.Option(help="Limit of the memory tier, such as 2GB.")]
Disk = Annotated[str | None, typer.Option(help="Limit of the chunk KVs on disk, such as 100GB; none by default.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0, ...")]
Engine = Annotated[Literal["torch", "vllm"], typer.Option(help="Who runs the model: torch (in process), or vllm.")]
RequireGate = Annotated[
    bool, typer.Option("--require-gate", help="Refuse blends that the quality gate has not passed; see calibrate.")
]
Tenant = Annotated[str | None, typer.Option(help="Whose chunk KVs these are; needs the salt in $BLENDKV_TENANT_SALT.")]
Encrypt = Annotated[
    bool, typer.Option("--encrypt", help="Encrypt a new store with $BLENDKV_ENCRYPTION_KEY; an old one stays as it is.")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads of torch.", min=1)]


def emit(command: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Print the command's JSON object: command, version, environment, rows, and what else it has to say."""
    from blendkv.eval.environment import environment

    result = {"command": command, "version": __version__, "environment": environment(), "rows": list(rows), **more}
    sys.stdout.write(json.dumps(result, indent=2, default=str) + "\n")


def built_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table; None is shown as a dash."""
    shown = Table(title=title, title_justify="left")
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    return shown


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a `built_table`."""
    out.print(built_table(title, columns, rows))


def number(value: float | None, digits: int = 3) -> str | None:
    """A figure for a table."""
    return None if value is None else f"{value:.{digits}f}"


def describe_machine() -> str:
    """One line of hardware and versions, to stand under every measured table."""
    from blendkv.eval.environment import environment

    e = environment()
    versions = f"torch {e['torch']}, transformers {e['transformers']}, blendkv {e['blendkv']}"
    return f"{e['cpu']} ({e['cpu_isa']}), {e['threads']} threads, {versions}, {e['date']}"


class Stages:
    """Progress of a job with named stages: a bar with rate and time left per stage, on standard error."""

    def __init__(self, progress: Progress, units: Mapping[str, str]) -> None:
        self._progress, self._units = progress, units
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Move a stage's bar."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total, unit=self._units.get(stage, ""), rate="")
        task = self._progress.tasks[self._tasks[stage]]
        rate = f"{task.speed:,.0f}/s" if task.speed else ""
        self._progress.update(self._tasks[stage], completed=done, total=total, rate=rate)


@contextmanager
def stages(units: Mapping[str, str], quiet: bool) -> Iterator[Stages]:
    """Open the progress bars of a job; ``quiet``, or without a terminal, nothing is drawn."""
    columns = (
        TextColumn("{task.description:>10}"), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.completed:,.0f} {task.fields[unit]} {task.fields[rate]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=err, disable=quiet or not err.is_terminal) as progress:
        yield Stages(progress, units)


def set_threads(threads: int | None) -> None:
    """Set torch's CPU threads, if asked."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)

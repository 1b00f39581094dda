"""The command line: one module per command, errors in one line, exit codes 2 (wrong input) and 1 (failed job)."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from itertools import pairwise
from typing import Any

import typer

from blendkv import __version__
from blendkv.cli import ask, bench, calibrate, daemon, demo, doctor, eval, ingest, plan, serve, store, store_transfer
from blendkv.errors import BlendKVError

app = typer.Typer(
    name="blendkv", add_completion=True, pretty_exceptions_enable=False,
    help="Chunk KV caches for RAG: compute each passage's KV once, blend at query time.",
)  # fmt: skip
_INTERRUPTED = 130
# Older versions of typer use the installed click, newer ones carry their own: one public name leads to either.
_UsageError: Any = typer.BadParameter.__base__

app.command("demo")(demo.demo)
app.command("ingest")(ingest.ingest)
app.command("ask")(ask.ask)
app.command("serve")(serve.serve)
app.command("daemon")(daemon.daemon)
app.command("plan")(plan.plan)
app.command("calibrate")(calibrate.calibrate)
app.command("doctor")(doctor.doctor)
store.app.command("export")(store_transfer.export)
store.app.command("import")(store_transfer.import_)
app.add_typer(store.app, name="store")
app.add_typer(bench.app, name="bench")
app.add_typer(eval.app, name="eval")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"blendkv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show the trace of an error."),
) -> None:
    """Options that stand before the command."""


class _Lines(logging.Handler):
    """BlendKV's own log, one line a record, on whatever standard error is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record."""
        typer.echo(f"{record.levelname.lower()}: {_one_line(record.getMessage())}", err=True)


def _quiet_others() -> None:
    """Show our own warnings only: what the libraries below us log or warn of, users cannot act on."""
    root, ours = logging.getLogger(), logging.getLogger("blendkv")
    if not any(isinstance(handler, _Lines) for handler in ours.handlers):
        ours.addHandler(_Lines(logging.WARNING))
        root.addHandler(logging.NullHandler())  # without any handler, Python prints warnings itself
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    debug = "--debug" in arguments
    arguments = ["--debug", *(a for a in arguments if a != "--debug")] if debug else arguments
    if debug:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    else:
        _quiet_others()
    try:
        code = app(arguments, standalone_mode=False, prog_name="blendkv")
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        hint = f" ({context.command_path} --help lists what is allowed)" if context else ""
        code = _fail(f"{error.format_message()}{_given(error, arguments)}{hint}", error.exit_code, debug)
    except BlendKVError as error:
        code = _fail(str(error), error.exit_code, debug)
    except Exception as error:
        code = _fail(f"{type(error).__name__}: {error} (run with --debug for the trace)", 1, debug)
    if code == _INTERRUPTED:  # newer versions of typer return it for Ctrl-C instead of raising
        typer.echo("stopped; what was stored is kept: run the same command again to go on", err=True)
    sys.exit(code or 0)


def _given(error: Any, arguments: list[str]) -> str:
    """The value of the option that an error is about: not every message of typer's holds it."""
    names = getattr(getattr(error, "param", None), "opts", ())
    given = [value for name, value in pairwise(arguments) if name in names]
    return f", given {given[-1]!r}" if given else ""


def _fail(message: str, code: int, debug: bool) -> int:
    """Say in one line what went wrong, under its trace if that is asked for; return the exit code."""
    if debug:
        traceback.print_exc()
    typer.echo(f"error: {_one_line(message)}", err=True)
    return code


def _one_line(text: str) -> str:
    return " ".join(text.split())

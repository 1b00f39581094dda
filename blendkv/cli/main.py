"""The command line: one module per command, errors in one line, exit codes 2 (wrong input) and 1 (failed job)."""

from __future__ import annotations

import logging
import os
import sys

import click
import typer

from blendkv import __version__
from blendkv.cli import ask, bench, demo, doctor, ingest, plan, store
from blendkv.errors import BlendKVError

app = typer.Typer(
    name="blendkv", no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False,
    help="Chunk KV caches for RAG: compute each passage's KV once, blend at query time.",
)  # fmt: skip
app.command("demo")(demo.demo)
app.command("ingest")(ingest.ingest)
app.command("ask")(ask.ask)
app.command("plan")(plan.plan)
app.command("doctor")(doctor.doctor)
app.add_typer(store.app, name="store")
app.add_typer(bench.app, name="bench")


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


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    arguments = ["--debug", *(a for a in arguments if a != "--debug")] if debug else arguments
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        code = app(arguments, standalone_mode=False)
    except click.exceptions.Abort:
        typer.echo("stopped; run the same command again to go on", err=True)
        code = 130
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except BlendKVError as error:
        if debug:
            raise
        typer.echo(f"error: {error}", err=True)
        code = error.exit_code
    except Exception as error:
        if debug:
            raise
        typer.echo(f"error: {type(error).__name__}: {error} (run with --debug for the trace)", err=True)
        code = 1
    sys.exit(code or 0)

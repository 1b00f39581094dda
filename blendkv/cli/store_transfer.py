"""`blendkv store export` and `import`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blendkv.cli.common import Disk, Encrypt, Json, Store, emit, out, stages
from blendkv.config import format_bytes, parse_bytes

if TYPE_CHECKING:
    from blendkv.store.transfer import Progress, TransferReport

Archive = Annotated[Path, typer.Argument(help="The tar file.", show_default=False)]


def export(
    store: Store,
    archive: Archive,
    plain: Annotated[bool, typer.Option("--plain", help="Write the chunks of an encrypted store unencrypted.")] = False,
    as_json: Json = False,
) -> None:
    """Write all chunk KVs into a tar file; engines may go on meanwhile."""
    from blendkv.pipeline import check_store
    from blendkv.store.transfer import export_chunks, opened

    check_store(store)
    with opened(Path(store).expanduser()) as disk:
        report = _run("export", lambda progress: export_chunks(disk, archive, progress, plain=plain), as_json)
    _tell("export", report, f"wrote {report.chunks} chunk KVs ({format_bytes(report.bytes)}) to {archive}", as_json)


def import_(store: Store, archive: Archive, disk: Disk = None, encrypt: Encrypt = False, as_json: Json = False) -> None:
    """Store the chunk KVs of a tar file that export wrote; what is there already is left as it is."""
    from blendkv.store.transfer import import_chunks, opened

    limit = None if disk is None else parse_bytes(disk)
    with opened(Path(store).expanduser(), limit, encrypt or None) as tier:
        report = _run("import", lambda progress: import_chunks(tier, archive, progress), as_json)
    line = f"stored {report.chunks} chunk KVs ({format_bytes(report.bytes)}); {report.present} were there already"
    _tell("import", report, line, as_json)


def _run(name: str, work: Callable[[Progress], TransferReport], as_json: bool) -> TransferReport:
    with stages({name: "chunks"}, quiet=as_json) as bars:
        return work(lambda done, total: bars(name, done, total))


def _tell(name: str, report: TransferReport, line: str, as_json: bool) -> None:
    if as_json:
        emit(f"store {name}", [asdict(report)])
    else:
        out.print(line, soft_wrap=True, markup=False)
        for key, reason in report.left_out:
            out.print(f"left out {key[:76]}: {reason}", soft_wrap=True, markup=False)
    if report.left_out:
        raise typer.Exit(1)

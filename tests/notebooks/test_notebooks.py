"""The notebooks run from a clean kernel, and what is committed of them is what they give.

Each runs in a kernel of this very Python, offline, in an empty folder. Text and pictures hold figures that are measured
at run time: they are not compared, only which outputs a cell has.
"""

from __future__ import annotations

import ast
import base64
import copy
import io
import re
import sys
import tempfile
from pathlib import Path

import nbformat
import numpy as np
import pytest
from homes import own_home
from ipykernel.kernelspec import write_kernel_spec
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = ("first_blend", "rag_pipeline", "quality_vs_speed", "add_a_selector")
MAX_BYTES = 300_000
MAX_CELLS = 16
HANGS_AFTER = 600
"""Seconds of one cell."""
_MACHINE = re.compile(
    "|".join([r"(?<![\w.])/(?:work|tmp|root|home|Users|var)\b", *map(re.escape, (tempfile.gettempdir(), sys.prefix))])
)
_SILENT = (ast.Import, ast.ImportFrom, ast.FunctionDef)

pytestmark = [
    pytest.mark.xdist_group("notebooks"),
    pytest.mark.filterwarnings("ignore"),  # of jupyter's libraries: the notebooks' own code runs in the kernel
]


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def form(output) -> tuple[str, ...]:
    """What kind of output it is."""
    if output.output_type == "stream":
        return ("stream", output.name)
    return (output.output_type, *sorted(output.get("data", ())))


def forms(notebook) -> list[list[tuple[str, ...]]]:
    return [[form(output) for output in cell.outputs] for cell in code_cells(notebook)]


def texts(notebook) -> list[str]:
    """Sources and outputs, pictures left out."""
    found = [cell.source for cell in notebook.cells]
    for cell in code_cells(notebook):
        for output in cell.outputs:
            found.append(output.get("text", ""))
            found += [text for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    return found


def pictures(notebook) -> list[Image.Image]:
    data = [output.get("data", {}).get("image/png") for cell in code_cells(notebook) for output in cell.outputs]
    return [Image.open(io.BytesIO(base64.b64decode(png))).convert("L") for png in data if png is not None]


def silent(cell) -> bool:
    """Whether a cell only imports and defines."""
    return all(isinstance(statement, _SILENT) for statement in ast.parse(cell.source).body)


def faults(notebook) -> list[str]:
    """What must not be in a notebook, committed or just run."""
    found = []
    for number, cell in enumerate(code_cells(notebook), 1):
        if not cell.outputs and not silent(cell):
            found.append(f"code cell {number} has no output")
        if cell.execution_count != number:
            found.append(f"code cell {number} was run as number {cell.execution_count}: run all from a clean kernel")
        kinds = [form(output) for output in cell.outputs]
        if ("stream", "stderr") in kinds or any(kind[0] == "error" for kind in kinds):
            found.append(f"code cell {number} complains")
    found += [f"a path of a machine: {place[0]}" for text in texts(notebook) if (place := _MACHINE.search(text))]
    found += ["a blank picture" for picture in pictures(notebook) if np.asarray(picture).std() < 1]
    if set(notebook.metadata) != {"kernelspec", "language_info"} or notebook.metadata.kernelspec.name != "python3":
        found.append(f"metadata of a machine: {dict(notebook.metadata)}")
    return found


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """Settings, kernel and folders of nobody; returns the folder in which a notebook may run."""
    write_kernel_spec(tmp_path / "share" / "kernels" / "python3")
    folders = {
        "JUPYTER_PATH": "share", "JUPYTER_CONFIG_DIR": "config", "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTER_DATA_DIR": "data", "IPYTHONDIR": "ipython",
    }  # fmt: skip
    for variable, name in folders.items():
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.setenv("BLENDKV_HOME", str(own_home(tmp_path / "blendkv")))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress not found")  # tqdm's wish for ipywidgets
    monkeypatch.delenv("MPLBACKEND", raising=False)
    assert KernelSpecManager().get_kernel_spec("python3").argv[0] == sys.executable
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def run(notebook, folder: Path):
    """A copy, run whole in a fresh kernel.

    Raises
    ------
    CellExecutionError
        If a cell fails, with its source and traceback.
    """
    fresh = copy.deepcopy(notebook)
    for cell in code_cells(fresh):
        cell.outputs, cell.execution_count = [], None
    NotebookClient(
        fresh, kernel_name="python3", timeout=HANGS_AFTER, coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute()  # fmt: skip
    fresh.metadata = notebook.metadata
    return fresh


def test_every_notebook_is_tested():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed(name):
    """Whole, small, and of no machine in particular."""
    notebook = read(name)
    nbformat.validate(notebook)
    assert (FOLDER / f"{name}.ipynb").stat().st_size < MAX_BYTES
    assert len(notebook.cells) <= MAX_CELLS
    assert faults(notebook) == []
    assert "pip install 'blendkv[demo,eval]'" in notebook.cells[0].source


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_gives_what_is_committed(name, clean):
    notebook = read(name)
    fresh = run(notebook, clean)
    assert faults(fresh) == []
    assert forms(fresh) == forms(notebook)
    assert list(clean.iterdir()) == []  # what a notebook writes goes away with it


def test_faults_are_found(clean):
    """The checks themselves, on a notebook with all that they look for."""
    cells = [
        "import sys\nprint('warned', file=sys.stderr)",
        "import tempfile\nprint(tempfile.gettempdir())",
        "number = 1",
        "def quiet():\n    pass",
    ]
    metadata = {"kernelspec": {"name": "other", "display_name": "o"}, "language_info": {"name": "python"}}
    bad = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells], metadata=metadata)
    fresh = run(bad, clean)
    found = faults(fresh)
    fresh.cells[3].execution_count = 7
    late = [fault for fault in faults(fresh) if fault not in found]
    assert [fault.partition(":")[0] for fault in found] == [
        "code cell 1 complains", "code cell 3 has no output", "a path of a machine", "metadata of a machine",
    ]  # fmt: skip
    assert [fault.partition(":")[0] for fault in late] == ["code cell 4 was run as number 7"]
    assert forms(fresh) != forms(bad)


def test_a_failing_cell_is_told_with_its_traceback(clean):
    bad = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("from math import sqrt\nsqrt(-1)")])
    with pytest.raises(CellExecutionError, match=r"(?s)sqrt\(-1\).*ValueError"):
        run(bad, clean)

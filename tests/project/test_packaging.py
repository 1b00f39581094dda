"""The package list is the disk's, and what the README shows runs as written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_on_disk_is_listed_and_the_reverse():
    mapped = PROJECT["tool"]["setuptools"]["package-dir"]
    found = set()
    for name, folder in mapped.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            if parts and f"{name}.{parts[0]}" in mapped:
                continue  # a symlink to a mapped folder
            found.add(".".join((name, *parts)))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_mapped_folders_are_linked_into_the_package():
    for name, folder in PROJECT["tool"]["setuptools"]["package-dir"].items():
        if name != "blendkv":
            link = ROOT / name.replace(".", "/")
            assert link.is_symlink()
            assert link.resolve() == (ROOT / folder).resolve()


def test_version_is_said_once():
    import blendkv

    assert blendkv.__version__ == PROJECT["project"]["version"]


def test_public_names_resolve_and_import_is_light():
    code = "import sys, blendkv; assert 'torch' not in sys.modules; [getattr(blendkv, n) for n in blendkv.__all__]"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)


def test_import_from_the_wheel(tmp_path):
    """The built wheel holds every package and no test."""
    import zipfile

    source = tmp_path / "source"
    for name in ("blendkv", "retrieval", "kernels", "eval"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    subprocess.run(command, check=True)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        assert package.replace(".", "/") + "/__init__.py" in names
    assert "blendkv/py.typed" in names
    assert not [n for n in names if n.startswith(("tests/", "retrieval/", "kernels/", "eval/"))]


@pytest.mark.xdist_group("real")
def test_the_readme_runs_as_written(tmp_path):
    """Its first Python block, in a folder with docs/, prints an answer, sources and figures.

    The second one needs the server: tests/vllm/test_readme.py.
    """
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 2
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    run = subprocess.run(
        [sys.executable, "-c", blocks[0]], cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "docs/architecture.md" in run.stdout
    assert re.search(r"budget spent: 0\.0\d", run.stdout)


def test_every_relative_link_in_the_documents_exists():
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"

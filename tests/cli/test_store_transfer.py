"""`blendkv store export` and `import`."""

from __future__ import annotations

import json


def test_there_and_back(cli, store, tmp_path):
    archive = tmp_path / "chunks.tar"
    done = cli("store", "export", "--store", store, archive, "--json")
    assert done.code == 0, done.err
    (row,) = json.loads(done.out)["rows"]
    assert row["chunks"] > 0
    assert (row["present"], row["left_out"]) == (0, [])
    done = cli("store", "import", "--store", tmp_path / "new", archive)
    assert done.code == 0
    assert f"stored {row['chunks']} chunk KVs" in done.out
    done = cli("store", "import", "--store", tmp_path / "new", archive, "--disk", "1GB")
    assert f"{row['chunks']} were there already" in done.out
    listed = [json.loads(cli("store", "ls", "--store", s, "--json").out)["rows"] for s in (store, tmp_path / "new")]
    assert sorted(r["key"] for r in listed[0]) == sorted(r["key"] for r in listed[1])


def test_what_is_damaged_is_named(cli, store, tmp_path):
    path = next((store / "kv").rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:100])
    done = cli("store", "export", "--store", store, tmp_path / "chunks.tar")
    assert done.code == 1
    assert f"left out {path.stem}: truncated" in done.out


def test_wrong_input_is_one_line(cli, store, tmp_path):
    done = cli("store", "import", "--store", store, tmp_path / "missing.tar")
    assert (done.code, len(done.err.strip().splitlines())) == (2, 1)
    (tmp_path / "there.tar").write_bytes(b"")
    done = cli("store", "export", "--store", store, tmp_path / "there.tar")
    assert done.code == 2
    assert "is there already" in done.err

from __future__ import annotations

import datasets
import pytest

from blendkv.retrieval import load_corpus, source_names


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    """Caches in the test's folder, no network, no bars."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def load(spec):
    errors: list[str] = []
    documents = list(load_corpus([spec], on_skip=lambda error: errors.append(str(error))))
    return documents, errors


@pytest.fixture
def rows():
    return datasets.Dataset.from_dict({"text": ["one", "two", " "], "title": ["A", "B", "C"], "body": ["x", "y", "z"]})


def test_a_saved_dataset(tmp_path, rows):
    rows.save_to_disk(tmp_path / "saved")
    spec = f"hf:{tmp_path}/saved"
    documents, errors = load(spec)
    assert [d.id for d in documents] == [f"{spec}:1", f"{spec}:2"]
    assert documents[1].metadata == {"source": spec, "title": "B", "body": "y"}
    assert len(errors) == 1
    assert "row 3: column 'text' is empty" in errors[0]
    documents, _ = load(f"{spec}#body")
    assert [d.text for d in documents] == ["x", "y", "z"]
    assert [d.id for d in documents] == [f"{spec}:{n}" for n in (1, 2, 3)]
    assert source_names([f"{spec}#body"]) == [spec]


def test_saved_splits(tmp_path, rows):
    datasets.DatasetDict({"validation": rows.select([0]), "test": rows.select([1])}).save_to_disk(tmp_path / "saved")
    spec = f"hf:{tmp_path}/saved"
    documents, _ = load(f"{spec}@test#body")
    assert [(d.id, d.text) for d in documents] == [(f"{spec}@test:1", "y")]
    _, errors = load(spec)
    assert "no split 'train'; splits there: validation, test: name one with @SPLIT" in errors[0]


def test_a_single_split_needs_no_name(tmp_path, rows):
    datasets.DatasetDict({"test": rows.select([1])}).save_to_disk(tmp_path / "saved")
    documents, _ = load(f"hf:{tmp_path}/saved")
    assert [d.text for d in documents] == ["two"]


def test_a_folder_of_data_files(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "from a file"}\n')
    documents, errors = load(f"hf:{tmp_path}/data")
    assert not errors
    assert [d.text for d in documents] == ["from a file"]


def test_wrong_datasets(tmp_path, rows):
    rows.save_to_disk(tmp_path / "saved")
    spec = f"hf:{tmp_path}/saved"
    cases = {
        f"{spec}#wrong": "no column 'wrong'; columns there: text, title, body",
        f"{spec}@dev": "no split 'dev'; it has 'train' only",
        f"hf:{tmp_path}/gone": "cannot be loaded",
    }
    for wrong, message in cases.items():
        documents, errors = load(wrong)
        assert not documents
        assert len(errors) == 1
        assert message in errors[0]
        assert "\n" not in errors[0]


def test_whatever_a_dataset_raises_is_one_line(monkeypatch):
    def fail(name, config):
        assert (name, config) == ("someone/else", "subset")
        raise ConnectionError("no way\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    documents, errors = load("hf:someone/else:subset@test")
    assert not documents
    assert errors == ["hf:someone/else: cannot be loaded (no way to the hub); check the name, or the path"]

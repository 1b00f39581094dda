"""Wrong input: exactly one line on standard error, which says what was given, what is allowed, what to do; exit 2."""

from __future__ import annotations

import errno
import os
import re
import sqlite3

import pytest
from pypdf import PdfWriter
from tiny_hub import CONTEXT, write_corpus

from blendkv.pipeline import RagPipeline
from blendkv.store.tiered import KVStore


def refused(result, *parts, code=2):
    """Check the contract and that all of ``parts`` are in the line."""
    assert result.code == code
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in lines[0]
    assert result.out == ""
    for part in parts:
        assert part in lines[0]


def ask(cli, store, *options, question="What is lambda?"):
    return cli("ask", question, "--store", store, "--max-new-tokens", 2, *options)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--budget", "1.5"), ("budget 1.5", "[0, 1]")),
        (("--budget", "-0.1"), ("budget -0.1", "[0, 1]")),
        (("--budget", "nan"), ("budget nan", "[0, 1]")),
        (("--budget", "much"), ("--budget", "'much'")),
        (("--selector", "best"), ("unknown selector 'best'", "head_query", "strided")),
        (("--mode", "full", "--budget", "0.1"), ("--mode is full", "for --mode blend: drop them")),
        (("--mode", "bogus"), ("--mode", "'bogus'", "'full'", "'reuse'", "'blend'")),
        (("--mode", "blend:strided"), ("--mode", "'blend:strided'", "'blend'")),
        (("--where", "title"), ("--where 'title'", "KEY=VALUE", "--where title=lambda")),
        (("--where", "=x"), ("--where '=x'", "KEY=VALUE")),
        (("--where", 'a"b=x'), ("filter field", "without double quotes")),
        (("--memory", "2XB"), ("size '2XB'", "GB")),
        (("--disk", "lots"), ("size 'lots'", "GiB")),
        (("--top-k", "0"), ("k is 0", "at least 1")),
        (("--max-new-tokens", "0"), ("max_new_tokens is 0", "at least 1")),
        (("--temperature", "-1"), ("temperature is -1", "0 (greedy) or more")),
        (("--dtype", "int3"), ("unknown dtype 'int3'", "bfloat16")),
        (("--device", "nope"), ("device 'nope'", "cpu")),
        (("--threads", "0"), ("--threads", "'0'", "1")),
        (("--nope",), ("--nope",)),
    ],
)
def test_options_of_ask(cli, store, options, parts):
    refused(ask(cli, store, *options), *parts)


def test_no_such_command(cli):
    refused(cli("aks"), "'aks'", "--help")
    refused(cli("store"), "Missing command", "--help")
    refused(cli("ask", "--store", "x"), "question")
    refused(cli("ingest", "x"), "--store")


def test_no_store_there(cli, tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        refused(ask(cli, path), f"{path} holds no store", f"blendkv ingest CORPUS --store {path}")
        for command in (("ls",), ("stat",), ("verify",), ("gc",), ("pin", "0123456789"), ("rm", "0123456789")):
            refused(cli("store", *command, "--store", path), f"{path} holds no store")
    assert list(tmp_path.iterdir()) == []


def test_keys_that_name_no_chunk(cli, store):
    refused(cli("store", "rm", "abc", "--store", store), "'abc' is too short", "at least 8", "store ls")
    refused(cli("store", "pin", "zzzzzzzzz", "--store", store), "names 0 chunks", "store ls")


def test_no_model_there(cli, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", ["with"])
    (tmp_path / "empty").mkdir()
    for model, says in (
        (tmp_path / "none", "is no model folder"), (corpus / "with.txt", "is no model folder"),
        (tmp_path / "empty", "holds no config.json"),
    ):  # fmt: skip
        result = cli("ingest", corpus, "--store", tmp_path / "s", "--model", model)
        refused(result, str(model), says, "give a folder that transformers can load, a hub id, or 'demo'")
        assert not (tmp_path / "s").exists()
        refused(cli("plan", "--tokens", 10, "--model", model), str(model), says)
        refused(cli("bench", "ttft", "--model", model), str(model), says)


def test_the_store_of_another_model(cli, store, other_folder):
    result = ask(cli, store, "--model", other_folder)
    refused(result, str(store), str(other_folder), "use that model, or ingest into another store")


@pytest.mark.parametrize(
    ("database", "change"),
    [
        ("collection.sqlite", "UPDATE meta SET value = '999' WHERE key = 'format'"),
        ("index.sqlite", "PRAGMA user_version = 999"),
    ],
)
def test_a_newer_format(cli, store, database, change):
    connection = sqlite3.connect(store / database)
    with connection:
        connection.execute(change)
    connection.close()
    refused(ask(cli, store), "999", "newer", str(store))


def test_something_else_under_the_store_name(cli, tmp_path, llama_folder):
    corpus = write_corpus(tmp_path / "corpus", ["with"])
    result = cli("ingest", corpus, "--store", corpus / "with.txt", "--model", llama_folder)
    refused(result, "with.txt is a file", "directory of its own")
    result = cli("ingest", corpus, "--store", corpus, "--model", llama_folder)
    refused(result, "is not a store and holds other files")


@pytest.mark.parametrize("mode", ["full", "blend"])
def test_too_long(cli, store, mode):
    result = ask(cli, store, "--mode", mode, question="word " * CONTEXT)
    refused(result, f"holds {CONTEXT}", "in the question", "shorten the question")
    assert len(result.err) < 500, "the question itself must not be printed"
    many = ask(cli, store, "--mode", mode, "--top-k", 500, question="word " * (CONTEXT // 5))
    refused(many, f"holds {CONTEXT}", "chunks", "fewer or smaller chunks (--top-k)")


def test_an_empty_question(cli, store):
    refused(ask(cli, store, question=" "), "is empty", "ask something")


def test_options_of_the_others(cli, tmp_path, llama_folder):
    corpus = write_corpus(tmp_path / "corpus", ["with"])
    base = ("ingest", corpus, "--store", tmp_path / "s", "--model", llama_folder)
    refused(cli(*base, "--precompute", "some"), "--precompute", "'all'", "'lazy'")
    refused(cli(*base, "--precompute-bytes", "ten"), "size 'ten'")
    refused(cli(*base, "--recipe", "none"), "--recipe", "'system'", "'bos'")
    assert not (tmp_path / "s").exists()
    refused(cli(*base, "--chunk-tokens", "1"), "1", "tokens")
    bench = ("bench", "ttft", "--model", llama_folder)
    refused(cli(*bench, "--modes", "full,bogus"), "unknown mode 'bogus'", "blend:SELECTOR@BUDGET")
    refused(cli(*bench, "--modes", ""), "name at least one")
    refused(cli(*bench, "--tiers", "tape"), "unknown tier tape", "memory, disk")
    refused(cli(*bench, "--repeats", "0"), "repeats is 0", "at least 1")
    refused(cli(*bench, "--chunks", "30", "--chunk-tokens", "100"), f"holds {CONTEXT}", "fewer or smaller chunks")
    refused(cli(*bench, "--chunk-tokens", "99999999"), "topics of 99999999 tokens", "fewer or smaller")
    refused(cli("demo", "--questions", "99"), "--questions is 99", "1 to")
    refused(cli("demo", "--precompute-bytes", "x"), "size 'x'")
    refused(cli("plan", "--tokens", "10", "--folder", tmp_path / "none", "--model", llama_folder), "is no folder")


def test_models_that_are_not_blended(cli, gpt2_folder, mla_folder):
    refused(cli("plan", "--tokens", 10, "--model", mla_folder), "multi-head latent attention", "use full prefill")
    refused(cli("bench", "ttft", "--model", gpt2_folder, "--chunk-tokens", 40), "known rotation", "use full prefill")


def protected(path):
    writer = PdfWriter()
    writer.add_blank_page(100, 100)
    writer.encrypt("secret")
    writer.write(path)


@pytest.fixture
def odd_corpus(tmp_path, monkeypatch):
    """A good document among all that cannot be read."""
    corpus = write_corpus(tmp_path / "corpus", ["with"])
    (corpus / "a [b] empty.txt").write_bytes(b"")
    (corpus / "binary.txt").write_bytes(bytes(range(256)) * 40)
    (corpus / "latin.txt").write_bytes(b"caf\xe9 caf\xe9 caf\xe9")
    with (corpus / "line.txt").open("wb") as file:
        file.truncate(100 * 2**20)  # one line of 100 MB, on no blocks
    protected(corpus / "locked.pdf")
    (corpus / "shut").mkdir()
    own = os.scandir

    def scandir(path="."):
        if str(path).endswith("shut"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return own(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return corpus


def test_documents_that_cannot_be_read(cli, odd_corpus, tmp_path, llama_folder):
    result = cli("ingest", odd_corpus, "--store", tmp_path / "s", "--model", llama_folder)
    assert result.code == 2
    assert "documents: 1 added" in result.out
    lines = result.err.splitlines()
    assert len(lines) == 6
    for name, says in {
        "a [b] empty.txt": "empty", "binary.txt": "binary", "latin.txt": "UTF-8", "line.txt": "at most 33554432",
        "locked.pdf": "password", "shut": "cannot be read",
    }.items():  # fmt: skip
        [line] = [line for line in lines if f"/{name}:" in line]
        assert line.startswith("skipped: ")
        assert says.lower() in line.lower()
        assert re.search(r"[;:,] ?[a-z ]+", line)
    assert ask(cli, tmp_path / "s").code == 0


def test_sources_that_are_not_there(cli, tmp_path, llama_folder):
    result = cli("ingest", tmp_path / "none", "--store", tmp_path / "s", "--model", llama_folder)
    assert result.code == 2
    assert [line.startswith(f"skipped: {tmp_path}/none:") for line in result.err.splitlines()] == [True]
    empty = ask(cli, tmp_path / "s")
    assert (empty.code, "no passage was found" in empty.err) == (0, True)


def test_failed_jobs_exit_with_1(cli, tmp_path, llama_folder, store, monkeypatch):
    from blendkv.store import disk

    corpus = write_corpus(tmp_path / "corpus", ["with"])

    def full(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_all", full)
        result = cli("ingest", corpus, "--store", tmp_path / "s", "--model", llama_folder)
    lines = [line for line in result.err.splitlines() if not line.startswith("warning:")]
    assert (result.code, len(lines)) == (1, 1)
    assert lines[0].startswith("error: ")
    assert "no space on the device" in lines[0]
    assert cli("ingest", corpus, "--store", tmp_path / "s", "--model", llama_folder).code == 0

    def broken(*args, **kwargs):
        raise RuntimeError("the cable\nis loose")

    monkeypatch.setattr(RagPipeline, "stream", broken)
    refused(ask(cli, store), "RuntimeError: the cable is loose", "run with --debug for the trace", code=1)


def test_debug_shows_the_trace(cli, tmp_path):
    for arguments in (("--debug", "ask", "x", "--store", tmp_path), ("ask", "x", "--store", tmp_path, "--debug")):
        result = cli(*arguments)
        assert result.code == 2
        assert "Traceback (most recent call last)" in result.err
        assert result.err.splitlines()[-1].startswith(f"error: {tmp_path} holds no store")


def test_interrupted(cli, tmp_path, llama_folder, monkeypatch):
    """Ctrl-C: one line that says how to go on; the store is closed whole."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    corpus = write_corpus(tmp_path / "corpus", ["with"])
    with monkeypatch.context() as patch:
        patch.setattr(KVStore, "flush", interrupted)
        result = cli("ingest", corpus, "--store", tmp_path / "s", "--model", llama_folder)
    assert result.code == 130
    assert result.err.strip() == "stopped; what was stored is kept: run the same command again to go on"
    again = cli("ingest", corpus, "--store", tmp_path / "s", "--model", llama_folder)
    assert "1 unchanged" in again.out


def test_the_libraries_below_say_nothing(cli, store, monkeypatch):
    """Neither warnings nor log records of others reach standard error."""
    import logging
    import warnings

    own = RagPipeline.stream

    def chatty(self, *args, **kwargs):
        warnings.warn("old API", FutureWarning, stacklevel=1)
        logging.getLogger("bm25s").debug("Building index")
        logging.getLogger("transformers").warning("Token indices sequence length is longer")
        return own(self, *args, **kwargs)

    monkeypatch.setattr(RagPipeline, "stream", chatty)
    result = ask(cli, store)
    assert result.code == 0
    assert "old API" not in result.err
    assert "Building index" not in result.err
    assert "Token indices" not in result.err

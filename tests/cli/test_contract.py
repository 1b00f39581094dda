"""The installed command in processes of its own, with the real embedder: exit codes, and what goes to which stream."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

from tiny_hub import TOPICS, write_corpus

COMMAND = [sys.executable, "-c", "from blendkv.cli.main import main; main()"]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(*arguments):
    command = [*COMMAND, *(str(a) for a in arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=120)


def test_a_first_session(tmp_path, llama_folder):
    """Ingest, ask, ask wrongly: nothing but BlendKV's own words on standard error."""
    corpus = write_corpus(tmp_path / "corpus")
    options = ("--store", tmp_path / "s", "--model", llama_folder, "--chunk-tokens", 48)
    made = run("ingest", corpus, *options, "--json")
    assert (made.returncode, made.stderr) == (0, "")
    found = json.loads(made.stdout)
    assert found["command"] == "ingest"
    assert found["rows"][0]["documents"]["added"] == len(TOPICS)

    asked = run("ask", "What does nonlocal do?", "--store", tmp_path / "s", "--max-new-tokens", 4)
    assert asked.returncode == 0
    lines = asked.stderr.splitlines()
    assert [line.startswith("source: corpus/") for line in lines] == [True] * 6 + [False]
    assert lines[-1].startswith("blend:head_query@0.05; budget spent ")

    wrong = run("ask", "x", "--store", tmp_path / "none")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == (
        f"error: {tmp_path}/none holds no store; make one with: blendkv ingest CORPUS --store {tmp_path}/none\n"
    )


def test_interrupting_an_ingest(tmp_path, llama_folder):
    """Ctrl-C in the middle: exit 130 and one line; the store is whole."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(300):
        (corpus / f"{number}.txt").write_text(f"{number}: " + " ".join(TOPICS.values()) * 6)
    arguments = ("ingest", corpus, "--store", tmp_path / "s", "--model", llama_folder)
    process = subprocess.Popen(
        [*COMMAND, *(str(a) for a in arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=ENVIRONMENT,
    )  # fmt: skip
    while process.poll() is None and not (tmp_path / "s" / "collection.sqlite").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert err == "stopped; what was stored is kept: run the same command again to go on\n"
    from blendkv.store.tiered import KVStore

    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        assert store.verify().damaged == ()

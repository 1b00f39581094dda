"""Tenants, quotas and encryption on the command line."""

from __future__ import annotations

import base64
import json
import shutil

import pytest
from tiny_hub import write_corpus

from blendkv.daemon.client import DaemonStore
from blendkv.store.seal import KEY_VARIABLE
from blendkv.tenants import SALT_VARIABLE, tenant_tag

QUESTION = "What is a lambda expression?"


@pytest.fixture
def salt(monkeypatch):
    monkeypatch.setenv(SALT_VARIABLE, base64.b64encode(bytes(range(32))).decode())


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, base64.b64encode(bytes(range(1, 33))).decode())


def tenants(cli, store):
    done = cli("store", "stat", "--store", store, "--json")
    assert done.code == 0, done.err
    return {row["tag"]: row["chunks"] for row in json.loads(done.out)["tenants"]}


def test_each_tenant_computes_its_own(cli, store, llama_folder, salt):
    before = tenants(cli, store)
    assert set(before) == {""}
    for name in ("acme", "beta", "acme"):
        done = cli("ask", QUESTION, "--store", store, "--model", llama_folder, "--tenant", name, "--max-new-tokens", 1)
        assert done.code == 0, done.err
    after = tenants(cli, store)
    assert after[""] == before[""]
    assert after[tenant_tag("acme")] == after[tenant_tag("beta")] > 1
    shown = cli("store", "stat", "--store", store).out
    assert tenant_tag("acme")[:12] in shown
    assert tenant_tag("acme") not in shown


@pytest.mark.parametrize("command", [("ask", QUESTION), ("ingest", "corpus"), ("serve",)])
def test_a_tenant_without_the_salt_is_one_line(cli, store, llama_folder, monkeypatch, command, tmp_path):
    monkeypatch.delenv(SALT_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus")
    more = ("--port", 0) if command[0] == "serve" else ()
    done = cli(*command, "--store", store, "--model", llama_folder, "--tenant", "acme", *more)
    assert done.code == 2
    (line,) = done.err.strip().splitlines()
    assert "tenant 'acme' was named and BLENDKV_TENANT_SALT is not set" in line


def test_the_daemon_keeps_quotas_and_names_them(cli, store, salt, monkeypatch):
    seen = []

    def wait(signals):
        with DaemonStore(store, 20.0) as client:
            seen.extend((use.name, use.quota) for use in client.stat().tenants)
            seen.append(client.stat().tenant_quota)
        seen.append(cli("store", "stat", "--store", store).out)

    monkeypatch.setattr("signal.pthread_sigmask", lambda *_: set())
    monkeypatch.setattr("signal.sigwait", wait)
    options = ("--quota", "acme=10MB", "--quota", "beta=1GB", "--tenant-quota", "5MB")
    done = cli("daemon", "--store", store, "--memory", "16MB", *options)
    assert done.code == 0, done.err
    shown = seen.pop()
    assert seen.pop() == 5_000_000
    assert sorted(seen, key=str) == [("acme", 10_000_000), ("beta", 10**9), (None, None)]
    assert "acme" in shown


@pytest.mark.parametrize("quota", ["acme", "acme=much", "a b=1GB"])
def test_a_quota_that_cannot_be_is_one_line(cli, store, salt, quota):
    done = cli("daemon", "--store", store, "--quota", quota)
    assert (done.code, len(done.err.strip().splitlines())) == (2, 1)


def test_an_encrypted_store_from_ingest_to_answer(cli, llama_folder, key, tmp_path, monkeypatch):
    store, corpus = tmp_path / "sealed", write_corpus(tmp_path / "corpus")
    model = ("--model", llama_folder)
    done = cli("ingest", corpus, "--store", store, *model, "--chunk-tokens", 48, "--encrypt")
    assert done.code == 0, done.err
    assert list(store.rglob("*.sealed"))
    assert not list(store.rglob("*.safetensors"))
    ask = ("ask", QUESTION, "--store", store, *model, "--max-new-tokens", 1)
    assert cli(*ask).code == 0
    monkeypatch.delenv(KEY_VARIABLE)
    done = cli(*ask)
    assert done.code == 2
    assert "is encrypted and BLENDKV_ENCRYPTION_KEY is not set" in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_chunks_move_between_plain_and_encrypted_stores(cli, store, key, tmp_path):
    listed = sorted(row["key"] for row in json.loads(cli("store", "ls", "--store", store, "--json").out)["rows"])
    assert cli("store", "export", "--store", store, tmp_path / "a.tar").code == 0
    assert cli("store", "import", "--store", tmp_path / "new", tmp_path / "a.tar", "--encrypt").code == 0
    done = cli("store", "export", "--store", tmp_path / "new", tmp_path / "b.tar")
    assert done.code == 2
    assert "give --plain" in done.err
    assert cli("store", "export", "--store", tmp_path / "new", tmp_path / "b.tar", "--plain").code == 0
    assert cli("store", "import", "--store", tmp_path / "back", tmp_path / "b.tar").code == 0
    shutil.rmtree(tmp_path / "new")
    back = json.loads(cli("store", "ls", "--store", tmp_path / "back", "--json").out)["rows"]
    assert sorted(row["key"] for row in back) == listed

"""The real server over the embedded engine: processes, sockets, signals, and other people's clients."""

from __future__ import annotations

import re
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest
from server_process import (
    KEY,
    check_ingest,
    check_langchain,
    check_openai,
    check_openai_errors,
    check_outage,
    check_sigterm,
    check_sixteen_at_once,
    serving,
)

from blendkv.cli.main import main
from blendkv.serve.settings import parse_arguments, parse_stores

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def served(tmp_path_factory, llama_folder):
    """One server for the module; its memory tier is off, so that every chunk KV is read from disk."""
    folder = tmp_path_factory.mktemp("served")
    with serving(llama_folder, folder / "s", folder / "errors", "--memory", "0") as running:
        check_ingest(running)
        yield running


def test_openai(served):
    check_openai(served)


def test_openai_errors(served):
    check_openai_errors(served)


def test_langchain(served):
    check_langchain(served)


def test_sixteen_at_once(served):
    check_sixteen_at_once(served)


def test_the_code_in_the_documents(served, capsys):
    """Every Python block of docs/serve.md runs as written, but for the address, the key and the model's name."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "serve.md").read_text(), re.S)
    assert len(code) == 3
    for block in code:
        here = block.replace("http://127.0.0.1:8000", served.url).replace('"none"', f'"{KEY}"')
        here = here.replace('"demo', f'"{served.model}').replace(
            '{"path": "docs/architecture.md"}', '{"topic": "scope"}'
        )
        exec(here, {})
        assert capsys.readouterr().out.strip()


def test_an_outage_of_the_store(served):
    check_outage(served)


def test_sigterm(served):
    check_sigterm(served)


@pytest.mark.parametrize("grace", [0, 60])
def test_what_outlives_the_grace_time_is_cut_off(tmp_path, llama_folder, grace):
    """Visibly: the stream breaks. A second signal ends a long grace time; until then the server says what it does."""
    with serving(llama_folder, tmp_path / "s", tmp_path / "errors", "--grace", grace) as served:
        body = {"model": served.model, "prompt": "word " * 40, "max_tokens": 2000, "stream": True}
        headers = {"Authorization": f"Bearer {KEY}"}
        url = f"{served.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            served.process.send_signal(signal.SIGTERM)
            if grace:
                while (health := httpx.get(f"{served.url}/health")).status_code == 200:
                    pass
                assert (health.status_code, health.json()["status"]) == (503, "draining")
                assert served.post("/v1/completions", body).json()["error"]["code"] == "draining"
                served.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        assert served.process.wait(60) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--store", "{a}", "--store", "{b}"], "{b}': this name or folder came already"),
        (["--store", "x={a}", "--store", "y={a}"], "y={a}': this name or folder came already"),
        (["--store", "a b=c"], "a name has letters"), (["--store", "{a}", "--max-requests", "0"], "max_requests is 0"),
        (["--store", "{a}", "--api-key", ""], "API key is empty"), (["--store", "{a}", "--max-body", "much"], "'much'"),
        (["--store", "{a}", "--port", "{taken}"], "cannot listen on 127.0.0.1:{taken}"),
        (["--store", "{a}", "--mode", "wild"], "unknown mode 'wild'"),
        (["--store", "{a}", "--grace", "-1"], "grace is -1"),
        (["--store", "{a}", "--longest", "-1"], "longest -1.0 s"),
        (["--store", "{a}", "--longest", "9", "--admission", "fifo"], "--longest is for --admission market"),
        (["--store", "{a}", "--api-keys", "{b}"], "--api-keys {b} cannot be read"),
        (["--store", "{a}", "--api-keys", "{b}", "--tenant", "acme"], "--tenant is for a server of one tenant"),
        (["--store", "{a}", "--model", "{a}/none"], "none is no model folder"),
        (["--store", "{a}", "--engine-arg", "max_model_len"], "'max_model_len' is not KEY=VALUE"),
        (["--store", "{a}", "--engine-arg", "x=1"], "--engine-arg is for --engine vllm"),
        (["--store", "x={a}", "--store", "y={b}", "--engine", "vllm"], "vLLM's workers open one"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_line(options, words, tmp_path, llama_folder, capsys, own_logging):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {"a": tmp_path / "a", "b": tmp_path / "b", "taken": taken.getsockname()[1]}
        port = [] if "--port" in options else ["--port", "0"]
        given = [option.format(**names) for option in options]
        with pytest.raises(SystemExit) as ended:
            main(["serve", "--model", str(llama_folder), *port, *given])
        written = capsys.readouterr().err
        assert ended.value.code == 2, written
        assert written.count("\n") == 1
        assert words.format(**names) in written
        assert not names["a"].exists()


def test_without_the_extra(tmp_path, monkeypatch, capsys, own_logging):
    """The line that installs it, before a model is loaded."""
    for name in [name for name in sys.modules if name.startswith("blendkv.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--store", str(tmp_path / "s"), "--port", "0"])
    assert ended.value.code == 2
    assert "pip install 'blendkv[serve]'" in capsys.readouterr().err


def test_engine_arguments():
    found = parse_arguments(["max_model_len=8192", "enforce_eager=true", "quantization=fp8", 'x={"a": 1}'])
    assert found == {"max_model_len": 8192, "enforce_eager": True, "quantization": "fp8", "x": {"a": 1}}


def test_stores_have_names(tmp_path):
    assert parse_stores([str(tmp_path)]) == {"default": tmp_path}
    assert parse_stores([f"a.b-1={tmp_path}/x=y", f"{tmp_path}/p=q"]) == {
        "a.b-1": tmp_path / "x=y", "default": tmp_path / "p=q",
    }  # fmt: skip

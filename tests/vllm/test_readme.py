"""The README's server: its two commands and its request by the openai client, as written."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import vllm_engine  # noqa: F401 - skips without vLLM

ROOT = Path(__file__).parents[2]
PORT = 8000


def shell(command: str, folder: Path, **options: object) -> subprocess.Popen[str]:
    program, *arguments = shlex.split(command)
    assert program == "blendkv"
    own = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = {**os.environ, **own}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    code = "from blendkv.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, *arguments], cwd=folder, env=environment, text=True, **options
    )


@pytest.mark.filterwarnings("ignore")
def test_serve_and_ask_as_written(tmp_path):
    page = (ROOT / "README.md").read_text().split("## Serve it")[1]
    block = re.search(r"```console\n(.*?)```", page, re.S)
    assert block is not None
    ingest, serve = re.findall(r"^\$ (.*)$", block[1], re.M)
    request = re.search(r"```python\n(.*?)```", page, re.S)
    assert request is not None
    code = request[1]
    with socket.socket() as probe:  # another program may have the port: then another one
        taken = probe.connect_ex(("127.0.0.1", PORT)) == 0
    if taken:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        serve, code = f"{serve} --port {port}", code.replace(str(PORT), str(port))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "architecture.md").symlink_to(ROOT / "docs" / "architecture.md")
    assert shell(ingest, tmp_path).wait(timeout=600) == 0
    log = tmp_path / "log"
    with log.open("w") as file, shell(serve, tmp_path, stdout=file, stderr=file) as server:
        try:
            while "serving demo, demo/rag at http://127.0.0.1" not in log.read_text():
                assert server.poll() is None, log.read_text()
                time.sleep(0.5)
            asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
            assert asked.returncode == 0, asked.stderr
            assert "blended {" in asked.stdout
            assert "docs/architecture.md" in asked.stdout
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=120) == 0

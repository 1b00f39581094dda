"""A real HTTP endpoint that speaks Azure Blob Storage: Azurite, in a process of its own."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from email.utils import formatdate
from pathlib import Path

import pytest
from redis_process import PATIENCE, free_port

NAME = "azurite-blob"
INSTALLED = Path(__file__).parents[2] / ".azurite" / "node_modules" / ".bin"
"""Where ``make azurite`` puts it."""
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of Azurite's built-in account; it is public."""
_VERSION = "2021-12-02"


def find() -> str:
    """The server's path; without one the test is skipped."""
    found = shutil.which(NAME, path=f"{INSTALLED}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("Azurite is not installed: make azurite, which takes npm")
    return found


class AzureServer:
    """Started at once, with a container. Stop it in the end."""

    container = "chunks"

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._log = folder / "azurite.log"
        command = [find(), "--silent", "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--blobPort", str(self.port)], cwd=folder, stdout=log, stderr=subprocess.STDOUT
            )
        self._create()

    def environment(self) -> dict[str, str]:
        """What a client needs."""
        return {
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{self.port}/{ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"])),
        }

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()

    def _create(self) -> None:
        """Create the container once the server listens: a request signed with the account's key."""
        date = formatdate(usegmt=True)
        signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{_VERSION}\n"
        signed += f"/{ACCOUNT}/{ACCOUNT}/{self.container}\nrestype:container"
        digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{ACCOUNT}/{self.container}?restype=container",
            method="PUT",
            headers={
                "x-ms-date": date,
                "x-ms-version": _VERSION,
                "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
                "Content-Length": "0",
            },
        )
        end = time.monotonic() + PATIENCE
        while True:
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                    assert answer.status == 201
                return
            except urllib.error.URLError:
                assert self.process.poll() is None, self._log.read_text()
                assert time.monotonic() < end
                time.sleep(0.1)

"""A real HTTP endpoint that speaks S3: moto's server, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

PROGRAM = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class S3Server:
    """Started at once, with a bucket; ends with its parent. Stop it in the end."""

    bucket = "chunks"

    def __init__(self, folder: Path) -> None:
        with (folder / "s3.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.strip(), (folder / "s3.log").read_text()
        self.port = int(line)
        bucket = urllib.request.Request(f"http://127.0.0.1:{self.port}/{self.bucket}", method="PUT")
        with urllib.request.urlopen(bucket, timeout=60) as answer:
            assert answer.status == 200

    def environment(self, port: int | None = None) -> dict[str, str]:
        """What a client needs; ``port`` is that of a proxy before it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"])),
        }

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

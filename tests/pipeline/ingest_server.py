"""Imports and loads once, then runs one ingest per line of standard input, each in a forked child that can be killed.

A line is a JSON object: store, corpus, and after how many seconds to kill, or null. Answers with the exit code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from tiny_hub import open_pipeline

from blendkv.engines.torch.engine import TorchEngine


def main(model: str) -> None:
    engine = TorchEngine.load(model)
    print("ready", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        child = os.fork()
        if child == 0:
            with open_pipeline(task["store"], engine, memory=1 << 20) as pipeline:
                pipeline.ingest([task["corpus"]], chunk_tokens=32, prune=True)
            os._exit(0)
        if task["kill_after"] is not None:
            time.sleep(task["kill_after"])
            os.kill(child, signal.SIGKILL)  # not waited for yet, so the id is still the child's
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

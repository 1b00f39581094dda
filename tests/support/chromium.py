"""A headless Chromium over the DevTools protocol's pipe: enough to open a page and look at it, and no package more."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 120.0
"""Seconds for one answer, on a machine that has other things to do."""


def find() -> str:
    """The browser's path. Without one the test is skipped, but under CI it fails."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        told = f"no browser is installed (looked for {', '.join(NAMES)}): apt-get install chromium"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(told)
    return found


class Page:
    """An open page. ``events`` holds what the browser reported, in order."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._from, self._rest, self._count = to, answers, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        self("Page.setLifecycleEventsEnabled", enabled=True)

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._count += 1
        call = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            call["sessionId"] = self._session
        os.write(self._to, json.dumps(call).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            self.events.append(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready = select.select([self._from], [], [], max(0.0, end - time.monotonic()))[0]
            assert ready, "the browser does not answer"
            more = os.read(self._from, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int, height: int, dark: bool = False) -> None:
        """Load a file in a window of this size, and wait until all of it is there."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        loader = self("Page.navigate", url=path.resolve().as_uri())["loaderId"]
        while not any(_loaded(event, loader) for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is in the page, when the page has been laid out after it."""
        drawn = f"new Promise(done => {{ const v = {expression}; requestAnimationFrame(() => done(v)) }})"
        found = self("Runtime.evaluate", expression=drawn, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """The window as PNG; with ``whole``, all of the page."""
        path.write_bytes(base64.b64decode(self("Page.captureScreenshot", captureBeyondViewport=whole)["data"]))

    def pdf(self, path: Path) -> None:
        """The page as it is printed."""
        printed = self("Page.printToPDF", preferCSSPageSize=True, printBackground=False)
        path.write_bytes(base64.b64decode(printed["data"]))

    def complaints(self) -> list[str]:
        """Errors and warnings of console and page, and everything it asked for but files and data."""
        found = []
        for event in self.events:
            told = event["params"]
            url = told.get("request", {}).get("url", "")
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(told["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(str(told["args"]))
            elif event["method"] == "Log.entryAdded":
                found.append(told["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent" and not url.startswith(("file:", "data:")):
                found.append(url)
        return found


def _loaded(event: dict[str, Any], loader: str) -> bool:
    told = event["params"]
    return event["method"] == "Page.lifecycleEvent" and told["loaderId"] == loader and told["name"] == "load"


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with a profile of its own in ``folder`` and no way to the network."""
    program = find()
    pipes = [os.pipe(), os.pipe()]
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (pipes[0][0], pipes[1][1])]
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
        "--disable-extensions", "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder}", "--remote-debugging-pipe",
    ]  # fmt: skip
    # The protocol's pipes are file descriptors 3 and 4 of the browser; only a shell can put them there safely.
    started = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}', "bash", program, *options],
        pass_fds=theirs, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for fd in (*theirs, pipes[0][0], pipes[1][1]):
        os.close(fd)
    try:
        page = Page(pipes[0][1], pipes[1][0])
        yield page
        page._session = None
        page("Browser.close")
        started.wait(30)
    finally:
        started.kill()
        started.wait()
        for fd in (pipes[0][1], pipes[1][0]):
            os.close(fd)

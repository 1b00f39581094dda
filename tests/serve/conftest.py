"""The app in this process, over a tiny model and a small corpus."""

from __future__ import annotations

import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from scripted import Script
from tiny_hub import open_pipeline, write_corpus

from blendkv.serve.app import create_app
from blendkv.serve.backends import Backends
from blendkv.serve.settings import ServeSettings


@pytest.fixture(scope="session")
def filled(tmp_path_factory, llama) -> Path:
    """A store with a corpus in it; copy it before use."""
    folder = tmp_path_factory.mktemp("filled")
    with open_pipeline(folder / "s", llama) as pipeline:
        pipeline.ingest([write_corpus(folder / "corpus")], chunk_tokens=48)
    return folder / "s"


@pytest.fixture
def store(filled, tmp_path) -> Path:
    return shutil.copytree(filled, tmp_path / "store")


@pytest.fixture
def pipeline(store, llama):
    with open_pipeline(store, llama) as opened:
        yield opened


@pytest.fixture
def script(pipeline) -> Script:
    """The pipeline's answers come when the test lets them."""
    made = Script()
    made.play(pipeline)
    return made


@pytest_asyncio.fixture
async def connect(pipeline):
    """Start a server with settings, and return a client of it; ``connect.app`` is the last one's app."""
    async with AsyncExitStack() as opened:

        async def start(stores=None, alive=lambda: True, **settings: object) -> httpx.AsyncClient:
            backends = Backends("tiny", "torch", stores or {"default": pipeline}, alive=alive)
            app = create_app(backends, ServeSettings(**{"max_tokens": 6, **settings}))  # type: ignore[arg-type]
            start.app = app  # type: ignore[attr-defined]
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)
            return await opened.enter_async_context(client)

        yield start

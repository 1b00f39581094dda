"""The real small model, shared by the tests of this folder."""

from __future__ import annotations

import pytest
import torch

from blendkv.engines.torch.engine import TorchEngine


@pytest.fixture(scope="session")
def engine() -> TorchEngine:
    torch.set_num_threads(1)
    return TorchEngine.load("demo")


@pytest.fixture(scope="session")
def engine32() -> TorchEngine:
    torch.set_num_threads(1)
    return TorchEngine.load("demo", dtype="float32")

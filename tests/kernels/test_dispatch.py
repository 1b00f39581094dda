"""Which backend computes an op, and what is said when one cannot."""

import logging

import pytest
import torch

from blendkv.errors import InputError
from blendkv.kernels import AttentionParams, backends, dispatch, kv_deviation, selected_attention
from blendkv.kernels.testing import forced


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(dispatch, "_calls", dispatch.Counter())
    monkeypatch.setattr(dispatch, "_passed_over", {})
    monkeypatch.delenv(dispatch.FORCE, raising=False)


def attend():
    q = torch.randn(3, 2, 8)
    return selected_attention(q, q, q, torch.arange(3), AttentionParams(1.0)).out


def test_what_is_passed_over_is_said_once(fresh, monkeypatch, caplog):
    monkeypatch.setattr(backends, "why_not", lambda name: "no compiler" if name == "cpu" else None)
    monkeypatch.setitem(dispatch.IMPLEMENTED, "attention", ("cpu", "torch", "reference"))
    with caplog.at_level(logging.INFO, "blendkv.kernels.dispatch"):
        attend()
        attend()
    assert [r.message for r in caplog.records] == ["attention is not computed by cpu here: no compiler"]
    (choice,) = dispatch.choices()
    assert choice == dispatch.Choice("attention", "torch", 2, {"cpu": "no compiler"})


def test_a_forced_backend_is_used(fresh):
    with forced("reference"):
        attend()
    with forced("attention=reference, deviation=torch"):
        attend()
        kv_deviation(*[torch.zeros(1, 1, 1)] * 4)
    assert [(c.op, c.backend, c.calls) for c in dispatch.choices()] == [
        ("attention", "reference", 2),
        ("deviation", "torch", 1),
    ]


def test_a_forced_backend_that_is_not_there_is_an_error(fresh, monkeypatch):
    monkeypatch.setattr(backends, "why_not", lambda name: "there is no GPU")
    monkeypatch.setitem(dispatch.IMPLEMENTED, "attention", ("triton", "torch"))
    with forced("triton"), pytest.raises(InputError, match=r"forces 'triton' for attention.*there is no GPU; unset it"):
        attend()


@pytest.mark.parametrize("text", ["numpy", "attention=numpy", "rope=torch"])
def test_an_unknown_name_is_an_error(fresh, text):
    with forced(text), pytest.raises(InputError, match=f"BLENDKV_KERNELS='{text}' is not known; allowed: one of flash"):
        attend()

"""The rotation probe, and the tables with which K is moved.

Attention over a single key does not depend on position. So one token run alone at position p and at position 0 gives,
in every layer, K(p) = R(p) K(0) exactly, whatever the family; R is found by trying the model's own cos and sin under
each convention. A layer that matches none is not blended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from blendkv.engines.base import LayerSpec, ModelRunner, Rotation
from blendkv.errors import UnsupportedModelError
from blendkv.kernels import AttentionParams, RopeTable, rope_table, rotate, unrotate

PROBE_POSITIONS = (0, 1, 5, 23, 101)
PROBE_TOKENS = 3
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Allowed max |K - R K0| / max |K|; a wrong convention is off by about 1."""

_PAIRINGS: tuple[tuple[str, int], ...] = (("half", 0), ("interleaved", 0), ("half", -1), ("interleaved", -1))


class _ProbeSession:
    """Every row attends to itself alone; K and the call's parameters are kept."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionParams]] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        if layer in self.calls:
            raise UnsupportedModelError(
                f"attention layer {layer} ran twice in one pass; only one call per layer is known"
            )
        self.calls[layer] = (q, k.clone(), v, params)
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def probe_layers(runner: ModelRunner, token_ids: torch.Tensor, expected: int) -> tuple[LayerSpec, ...]:
    """Run the probe and return the spec of every layer.

    Parameters
    ----------
    runner
        The model; only ``forward`` and ``rotary`` are used.
    token_ids
        ``[PROBE_TOKENS]`` int64 on the runner's device: ordinary tokens of the vocabulary.
    expected
        Number of decoder layers of the config.

    Raises
    ------
    UnsupportedModelError
        If a layer has no attention of the known form, or its rotation matches no convention.
    """
    places = [p for p in PROBE_POSITIONS if p < runner.context]
    rows = token_ids.repeat(len(places))
    positions = torch.tensor(places, device=token_ids.device).repeat_interleave(len(token_ids))
    session = _ProbeSession()
    runner.forward(rows, positions, session)
    missing = sorted(set(range(expected)) - set(session.calls))
    if missing:
        raise UnsupportedModelError(
            f"layers {_short(missing)} of {expected} never called the attention interface (state-space, linear or "
            "custom attention); only softmax attention in every layer can be blended: use full prefill"
        )
    tables = runner.rotary(positions)
    specs = []
    for layer in range(expected):
        q, k, v, params = session.calls[layer]
        rotation = _match(layer, k, len(token_ids), tables, TOLERANCE[k.dtype])
        specs.append(LayerSpec(layer, q.shape[1], k.shape[1], k.shape[2], v.shape[2], params, rotation))
    return tuple(specs)


def _short(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return shown + (", ..." if len(numbers) > 4 else "")


def _candidates(
    tables: Mapping[str, tuple[torch.Tensor, torch.Tensor]], head_dim: int
) -> Iterator[tuple[Rotation, RopeTable]]:
    for name, (cos, sin) in tables.items():
        dims = 2 * cos.shape[-1]
        if dims > head_dim:
            continue
        for pairing, place in _PAIRINGS:
            offset = 0 if place == 0 else head_dim - dims
            if place != 0 and offset == 0:
                continue
            yield Rotation(name, pairing, offset), rope_table(cos, sin, pairing, offset)  # type: ignore[arg-type]


def _match(
    layer: int, k: torch.Tensor, tokens: int, tables: Mapping[str, tuple[torch.Tensor, torch.Tensor]], tolerance: float
) -> Rotation | None:
    """The convention with the smallest error below the tolerance; None is a layer without RoPE."""
    k = k.float()
    size = k.abs().max()
    base = k[:tokens]
    still = base.repeat(k.shape[0] // tokens, 1, 1)
    errors: list[tuple[float, Rotation | None]] = [(float((still - k).abs().max() / size), None)]
    for rotation, table in _candidates(tables, k.shape[-1]):
        raw = unrotate(base, table.rows(slice(0, tokens)))
        moved = rotate(raw.repeat(k.shape[0] // tokens, 1, 1), table)
        errors.append((float((moved - k).abs().max() / size), rotation))
    error, found = min(errors, key=lambda item: item[0])
    if not error <= tolerance:
        raise UnsupportedModelError(
            f"layer {layer} moves its keys by no known rotation (best convention is off by {error:.2g}, allowed "
            f"{tolerance:.0e}); positions must be RoPE or absent: use full prefill"
        )
    return found


def same_rotation(runner: ModelRunner, short: int, total: int) -> bool:
    """Whether a text of ``short`` tokens is rotated as it is within one of ``total``.

    False where dynamic NTK or LongRoPE change frequencies between the two lengths: KV computed alone is then not exact.
    """
    alone = runner.rotary(torch.tensor([short - 1], device=runner.device))
    within = runner.rotary(torch.tensor([short - 1, total - 1], device=runner.device))
    return all(torch.equal(a[0], b[0]) for name in alone for a, b in zip(alone[name], within[name], strict=True))


class RopeTables:
    """The cos/sin of a run of positions for every layer of a runner, one table per kind of rotation."""

    def __init__(self, runner: ModelRunner, positions: torch.Tensor) -> None:
        raw = runner.rotary(positions)
        self._tables: dict[Rotation, RopeTable] = {}
        for spec in runner.layers:
            r = spec.rotation
            if r is not None and r not in self._tables:
                self._tables[r] = rope_table(*raw[r.table], r.pairing, r.offset)
        self._by_layer = tuple(None if s.rotation is None else self._tables[s.rotation] for s in runner.layers)

    def layer(self, index: int) -> RopeTable | None:
        """The table of one layer; None where it has no RoPE."""
        return self._by_layer[index]


class RowTables:
    """Rows of `RopeTables` at fixed places, gathered once per kind of rotation and not once per layer."""

    def __init__(self, tables: RopeTables, rows: torch.Tensor) -> None:
        self._tables = tables
        self._rows = rows
        self._gathered: dict[int, RopeTable] = {}

    def layer(self, index: int) -> RopeTable | None:
        """The rows of one layer's table; None where it has no RoPE."""
        table = self._tables.layer(index)
        if table is None:
            return None
        if id(table) not in self._gathered:
            self._gathered[id(table)] = table.rows(self._rows)
        return self._gathered[id(table)]

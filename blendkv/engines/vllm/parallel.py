"""Tensor parallelism: every rank holds some of the heads, runs the same rows, and decides the same.

A blend runs the model, and the model's layers wait for all ranks in each of them. So whatever one rank alone can see
(a chunk that the store lacks, a read that fails) is agreed on before the model is run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from blendkv.engines.base import LayerSpec
from blendkv.errors import BlendKVError, StoreError, UnsupportedModelError
from blendkv.kernels import Statistic
from blendkv.store.base import ChunkReader
from blendkv.types import ChunkKV

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
PATIENCE = timedelta(minutes=5)
"""How long a rank waits for the others where they must agree; the slowest store of all ranks must fit in."""
GRACE = timedelta(seconds=30)
"""How long a rank that failed waits for the others to come to the same point: they fail too, or hang elsewhere."""


class PeerFaultError(BlendKVError):
    """Another rank failed, so this one gives up too."""


_KINDS: tuple[type[BlendKVError], ...] = (UnsupportedModelError, StoreError, PeerFaultError)
"""What a rank raises for a fault of another one: the first of these that the fault is, else the last."""


@dataclass(frozen=True)
class HeadShare:
    """The KV heads of one rank, as vLLM deals them out.

    With at least as many KV heads as ranks each rank holds ``total / size`` of them in a row; with fewer, each head is
    held by ``size / total`` ranks in a row.

    Parameters
    ----------
    total
        KV heads of the model.
    rank, size
        This rank, of how many.
    """

    total: int
    rank: int = 0
    size: int = 1

    @property
    def replicas(self) -> int:
        """Ranks that hold the same heads."""
        return max(1, self.size // self.total)

    @property
    def local(self) -> slice:
        """Which of all heads this rank holds."""
        count = max(1, self.total // self.size)
        first = self.rank // self.replicas * count
        return slice(first, first + count)

    def check(self, layers: Sequence[LayerSpec]) -> None:
        """Compare with what the model's layers hold.

        Raises
        ------
        UnsupportedModelError
            If some layer holds another number of heads, as where layers differ.
        """
        count = self.local.stop - self.local.start
        odd = [spec for spec in layers if spec.kv_heads != count]
        if self.size > 1 and odd:
            raise UnsupportedModelError(
                f"layer {odd[0].index} has {odd[0].kv_heads} KV heads on rank {self.rank} of {self.size}, where "
                f"{self.total} in all give {count}; only layers with equal numbers of KV heads are blended in "
                "parallel: use full prefill"
            )

    def take(self, reader: ChunkReader) -> ChunkKV:
        """Read a chunk KV whole and keep this rank's heads.

        Raises
        ------
        DamagedChunkError
            If it cannot be read.
        """
        pairs = [reader.layer(i) for i in range(reader.layers)]
        k, v = (tuple(p[which][:, self.local] for p in pairs) for which in (0, 1))
        return ChunkKV(reader.fingerprint, reader.recipe, reader.token_ids, k, v)


class Ranks:
    """The tensor-parallel ranks, seen from one of them. With one rank every method is trivial.

    All methods that exchange something must be called by all ranks, in the same order.

    Parameters
    ----------
    share
        Which KV heads this rank holds; names the rank and their number.
    device_group, host_group
        Process groups for tensors on the model's device and for those in host memory (gloo).
    """

    def __init__(self, share: HeadShare, device_group: Any = None, host_group: Any = None) -> None:
        self.share = share
        self._device, self._host = device_group, host_group

    @classmethod
    def of_vllm(cls, config: Any) -> Ranks:
        """The ranks of the vLLM worker that calls this; ``config`` is its ``VllmConfig``."""
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        heads = config.model_config.get_total_num_kv_heads()
        share = HeadShare(heads, group.rank_in_group, group.world_size)
        return cls(share, group.device_group, group.cpu_group)

    @property
    def rank(self) -> int:
        """Number of this rank; 0 is the one that writes to the store."""
        return self.share.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.share.size

    def reduce(self, tensor: torch.Tensor, statistic: Statistic) -> torch.Tensor:
        """Max or mean over the ranks, elementwise; see `blendkv.engines.base.ModelRunner.reduce`.

        Ranks hold equal numbers of query heads, so the mean of their means is the mean over all heads.
        """
        if self.size == 1:
            return tensor
        joined = tensor.clone(memory_format=torch.contiguous_format)
        op = dist.ReduceOp.MAX if statistic == "max" else dist.ReduceOp.SUM
        dist.all_reduce(joined, op=op, group=self._device)
        return joined if statistic == "max" else joined.div_(self.size)

    def agree(self, flags: Sequence[bool], patience: timedelta | None = None) -> list[bool]:
        """Which of the flags are true on all ranks.

        Ends the process if not all ranks come within ``patience``, by default `PATIENCE`: what they exchange would no
        longer belong together.
        """
        if self.size == 1 or not flags:
            return list(flags)
        votes = torch.tensor([bool(f) for f in flags], dtype=torch.uint8)
        try:
            work = dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._host, async_op=True)
            work.wait(patience or PATIENCE)
        except RuntimeError as error:
            _log.critical("rank %d of %d waited in vain for the others", self.rank, self.size, exc_info=error)
            _end()
        return [bool(vote) for vote in votes]

    def decide(self, make: Callable[[], _T]) -> _T:
        """What ``make`` returns on rank 0, on every rank; it runs nowhere else.

        Raises
        ------
        BlendKVError
            On every rank, if it fails.
        """
        if self.size == 1:
            return make()
        decision: list[Any] = [None]
        with self.together():
            if self.rank == 0:
                decision[0] = make()
        dist.broadcast_object_list(decision, group=self._host, group_src=0)
        return decision[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """The block succeeds on all ranks or fails on all: after it they agree.

        A rank whose own block was fine raises what the first failed rank says. A fault on one rank in the middle of
        the model's own collectives cannot be mended: the others wait there, and the failed rank ends its process after
        `GRACE`, upon which vLLM ends the engine.

        Raises
        ------
        UnsupportedModelError, StoreError, PeerFaultError
            For a fault of another rank, by its kind.
        """
        if self.size == 1:
            yield
            return
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        if own is not None:
            _log.info("rank %d failed, and tells the others", self.rank, exc_info=own)
        if not self.agree([own is None], None if own is None else GRACE)[0]:
            faults: list[tuple[int, str] | None] = [None] * self.size
            dist.all_gather_object(faults, None if own is None else _described(own), group=self._host)
            if own is None:
                raise _fault_of(faults)
        if own is not None:
            raise own

    def local(self, reader: ChunkReader) -> ChunkReader:
        """The rank's heads of a chunk KV, read whole into host memory; with one rank, the reader itself.

        Raises
        ------
        DamagedChunkError
            If it cannot be read; with one rank this shows only when its layers are read.
        """
        return reader if self.size == 1 else self.share.take(reader)

    def gather(self, kv: ChunkKV) -> ChunkKV | None:
        """A chunk KV with all heads, from each rank's own; None on all ranks but 0.

        ``kv`` is on the CPU, and of the same chunk on all ranks.
        """
        if self.size == 1:
            return kv
        mine = torch.cat([t.contiguous().view(torch.uint8).flatten() for t in (*kv.k, *kv.v)])
        parts = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(mine, parts, group=self._host, group_dst=0)
        if parts is None:
            return None
        whole = joined_heads([_shaped(part, kv) for part in parts[:: self.share.replicas]])
        layers = kv.layers
        return replace(kv, k=whole[:layers], v=whole[layers:])


def _end() -> NoReturn:
    """End this process at once: an orderly exit would wait for the exchange that cannot end."""
    logging.shutdown()
    os._exit(1)


def joined_heads(parts: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Tensors ``[tokens, kv_heads, head_dim]`` with the heads of all parts, in their order."""
    return tuple(torch.cat(same, 1) for same in zip(*parts, strict=True))


def _shaped(flat: torch.Tensor, like: ChunkKV) -> list[torch.Tensor]:
    """The bytes of K and V of all layers as tensors like those of ``like``."""
    found, start = [], 0
    for tensor in (*like.k, *like.v):
        stop = start + tensor.numel() * tensor.element_size()
        found.append(flat[start:stop].clone().view(tensor.dtype).view(tensor.shape))
        start = stop
    return found


def _described(error: Exception) -> tuple[int, str]:
    kind = next((i for i, known in enumerate(_KINDS) if isinstance(error, known)), len(_KINDS) - 1)
    return kind, f"{type(error).__name__}: {error}"


def _fault_of(faults: Sequence[tuple[int, str] | None]) -> BlendKVError:
    rank, (kind, text) = next((rank, fault) for rank, fault in enumerate(faults) if fault is not None)
    return _KINDS[kind](f"rank {rank} failed, so all ranks give up: {text}")

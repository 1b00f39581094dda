"""Teacher forcing inside vLLM: say which tokens come out, and keep the logits that the model had for them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor


class TeacherForcing(LogitsProcessor):
    """Idle until `record`; then it takes the one request that runs, and no other may run beside it.

    vLLM makes an instance per worker; what is asked of it is kept by the class, which the measurement knows.
    """

    _recording: ClassVar[bool] = False
    _forced: ClassVar[torch.Tensor | None] = None
    _seen: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._written: list[int] = []

    @classmethod
    def record(cls, forced: torch.Tensor | None) -> None:
        """Keep the next request's logits; ``forced`` ``[tokens]`` int64 is what it will say, None for its own words."""
        cls._recording, cls._forced, cls._seen = True, forced, {}

    @classmethod
    def taken(cls) -> torch.Tensor:
        """The logits since `record`, ``[tokens, vocab]`` float32; recording ends."""
        cls._recording = False
        return torch.stack([cls._seen[step] for step in sorted(cls._seen)])

    def is_argmax_invariant(self) -> bool:
        """Forced tokens are not the likeliest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow what the request has said so far."""
        if batch_update is not None and batch_update.added:
            self._written = batch_update.added[-1][3]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Keep the logits of this step, by the number of tokens said: a prefill in parts overwrites its own."""
        if not self._recording or logits.shape[0] == 0:
            return logits
        step = len(self._written)
        self._seen[step] = logits[0].float().clone()
        if self._forced is not None:
            logits[0].fill_(float("-inf"))
            logits[0, self._forced[step]] = 0.0
        return logits

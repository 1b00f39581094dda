"""One answer that vLLM decodes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from blendkv.blend import Mode
from blendkv.engines.base import Outcome
from blendkv.engines.generation import End, Generation
from blendkv.engines.vllm.loop import EngineLoop
from blendkv.engines.vllm.requests import FINISH_REASONS, outcome_of
from blendkv.errors import BlendKVError, EngineError, InputError

_PATIENCE = 10.0
"""Seconds to wait for an aborted request to be gone."""


class VllmGeneration(Generation):
    """One answer in flight, decoded by vLLM beside others. The request is sent when reading begins.

    Parameters
    ----------
    loop, llm
        vLLM's asynchronous engine, and the loop that it lives on.
    prompt, sampling
        vLLM's prompt and sampling parameters; the output kind is ``DELTA``.
    request_id
        Unique.
    asked
        The mode, if a blend was asked for of the connector.
    outcome
        What is known before: that nothing is blended, or how long the preparation took.
    """

    def __init__(
        self,
        loop: EngineLoop,
        llm: Any,
        prompt: Mapping[str, Any],
        sampling: Any,
        request_id: str,
        asked: Mode | None,
        outcome: Outcome,
    ) -> None:
        super().__init__(outcome)
        self._loop, self._llm = loop, llm
        self._prompt, self._sampling, self._id, self._asked = prompt, sampling, request_id, asked
        self._cancel: Callable[[], None] = lambda: None
        self._unwanted = False
        self._gone = threading.Event()

    async def _run(self, put: Callable[[Any], None]) -> str:
        """Send the request and pass on what comes; returns the finish reason."""
        async for out in self._llm.generate(dict(self._prompt), self._sampling, self._id):
            made = out.outputs[0]
            if made.token_ids and self.first_token_at is None:
                self.first_token_at = time.perf_counter()
            self.tokens.extend(made.token_ids)
            if out.finished:
                if self._asked is not None:
                    self.outcome = outcome_of(self._asked, out.kv_transfer_params, self.outcome.seconds["prepare"])
                reason = str(made.finish_reason)
                if reason == "error":
                    raise EngineError("vLLM failed while it decoded an answer; its log says why. Ask again")
            put(made.text)
        return FINISH_REASONS.get(reason, "cancelled")

    def _start(self, put: Callable[[Any], None]) -> None:
        def ended(task: asyncio.Task[str]) -> None:
            if task.cancelled():
                put(End("cancelled"))
            elif (error := task.exception()) is not None:
                put(ours(error))
            else:
                put(End(task.result()))
            self._gone.set()

        self._cancel = self._loop.start(self._run(put), ended)
        if self._unwanted:  # cancelled in the meantime
            self._cancel()

    def cancel(self) -> None:
        """Have vLLM abort the request."""
        self._unwanted = True
        self._cancel()

    def _join(self) -> None:
        if not self._loop.here:
            self._gone.wait(_PATIENCE)


def ours(error: BaseException) -> BaseException:
    """An error of vLLM's as one of our tree: the caller's to mend, or the engine's end.

    By the names of its classes: this runs on the event loop, where nothing is imported.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, BlendKVError):
        return error
    if "EngineDeadError" in kinds:
        return EngineError("vLLM's engine process is gone, its log says why; load the engine again")
    if "VLLMServerError" in kinds:
        return EngineError(f"vLLM failed: {error.__cause__ or error}; its log says why")
    if kinds & {"VLLMClientError", "ValueError"}:
        return InputError(f"vLLM refuses the request: {error}")
    return error

"""A pipeline whose answers come when a test lets them: queues, time-outs and cancellation without timing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from blendkv.answer import Answer, AnswerStream
from blendkv.engines.base import Outcome
from blendkv.engines.generation import End, Generation
from blendkv.pipeline import RagPipeline


class ScriptedGeneration(Generation):
    """Puts one piece per permit; ends after ``pieces`` of them, or when it is cancelled."""

    def __init__(self, script: Script) -> None:
        super().__init__(Outcome("full", seconds={"prepare": 0.0}))
        self._script = script
        self.cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _start(self, put: Callable[[Any], None]) -> None:
        self._put = put
        self._thread.start()

    def _run(self) -> None:
        for number in range(self._script.pieces):
            while not self._script.permits.acquire(timeout=0.01):
                if self.cancelled.is_set():
                    return
            if self.cancelled.is_set():
                self._script.permits.release()  # it was meant for another one
                return
            if self._script.fails_at == number:
                self._put(self._script.error)
                return
            self.first_token_at = self.first_token_at or time.perf_counter()
            self.tokens.append(number)
            self._put(f"{number} ")
        self._put(End("stop"))

    def cancel(self) -> None:
        self.cancelled.set()

    def _join(self) -> None:
        self._thread.join()


class Script:
    """What the pipeline's answers do; ``generations`` are those that were begun."""

    def __init__(self, pieces: int = 3) -> None:
        self.pieces = pieces
        self.permits = threading.Semaphore(0)
        self.fails_at: int | None = None
        self.error: BaseException = RuntimeError("secret detail")
        self.generations: list[ScriptedGeneration] = []

    def allow(self, pieces: int) -> None:
        for _ in range(pieces):
            self.permits.release()

    def play(self, pipeline: RagPipeline) -> None:
        """Make ``pipeline.answer`` follow this script; retrieval and prompts stay real."""

        def answer(prompt: Any, mode: Any, sources: Any = (), options: Any = None, **more: Any) -> AnswerStream:
            generation = ScriptedGeneration(self)
            self.generations.append(generation)

            def finish() -> Answer:
                times = {"ttft": 0.01, "total": 0.02}
                reason, count = generation.finish_reason, len(generation.tokens)
                return Answer(generation.text, tuple(sources), "full", times, None, None, reason, len(prompt), count)

            return AnswerStream(generation, finish)

        pipeline.answer = answer  # type: ignore[method-assign]

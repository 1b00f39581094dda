"""An answer in flight, whoever decodes it: blocking and asynchronous reading, cancellation, errors."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest

from blendkv.answer import Answer, AnswerStream
from blendkv.engines.base import Outcome
from blendkv.engines.generation import End, Generation
from blendkv.errors import InputError, StoreError

HELLO = ["Hel", "", "lo"]


class Scripted(Generation):
    """Puts what it is told to from a thread of its own; without an end in the script it waits to be cancelled."""

    def __init__(self, items):
        super().__init__(Outcome("full"))
        self.items, self.cancelled = items, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        for item in self.items:
            self.put(item)
        if not self.items or not isinstance(self.items[-1], End | Exception):
            assert self.cancelled.wait(20)
            self.put(End("cancelled"))

    def _start(self, put):
        self.put = put
        self.thread.start()

    def cancel(self):
        self.cancelled.set()

    def _join(self):
        self.thread.join()


def stream_of(*items):
    generation = Scripted(items)
    return generation, AnswerStream(
        generation, lambda: Answer(generation.text, (), "full", {}, finish_reason=generation.finish_reason)
    )


def test_pieces_then_the_whole():
    _, stream = stream_of(*HELLO, End("stop"))
    assert list(stream) == ["Hel", "lo"]
    assert (stream.answer.text, stream.answer.finish_reason) == ("Hello", "stop")
    assert list(stream) == []


def test_the_answer_reads_what_is_left():
    _, stream = stream_of(*HELLO, End("length"))
    pieces = iter(stream)
    assert next(pieces) == "Hel"
    assert stream.answer.finish_reason == "length"
    assert stream.answer is stream.answer


def test_asynchronous_reading():
    _, stream = stream_of(*HELLO, End("stop"))

    async def read():
        return [piece async for piece in stream]

    assert asyncio.run(read()) == ["Hel", "lo"]
    assert (stream.answer.text, stream.answer.finish_reason) == ("Hello", "stop")


@pytest.mark.parametrize("error", [StoreError("no"), ValueError("no")])
def test_an_error_reaches_either_reader(error):
    with pytest.raises(type(error), match="no"):
        list(stream_of("a", error)[1])

    async def read():
        return [piece async for piece in stream_of("a", error)[1]]

    with pytest.raises(type(error), match="no"):
        asyncio.run(read())


def test_an_answer_is_read_once():
    generation, stream = stream_of("a", End("stop"))
    list(stream)
    with pytest.raises(InputError, match="can be read once"):
        list(generation)


def test_leaving_the_loop_cancels():
    generation, stream = stream_of("a", "b")
    pieces = iter(stream)
    assert next(pieces) == "a"
    pieces.close()
    assert generation.cancelled.is_set()
    assert not generation.thread.is_alive()
    assert (stream.answer.text, stream.answer.finish_reason) == ("a", "cancelled")


def test_leaving_an_asynchronous_loop_cancels():
    generation, stream = stream_of("a", "b")

    async def read():
        async with aclosing(aiter(stream)) as pieces:
            async for _ in pieces:
                return

    asyncio.run(read())
    assert generation.cancelled.is_set()
    assert (stream.answer.text, stream.answer.finish_reason) == ("a", "cancelled")


def test_closed_before_it_was_read():
    generation, stream = stream_of("a")
    stream.close()
    assert generation.cancelled.is_set()
    assert not generation.thread.is_alive()
    assert (stream.answer.text, stream.answer.finish_reason) == ("", "cancelled")


def test_closed_by_another_thread_while_it_is_read():
    _, stream = stream_of("a")
    first, pieces = threading.Event(), []

    def read():
        for piece in stream:
            pieces.append(piece)
            first.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert first.wait(20)
    stream.close()
    reader.join(20)
    assert not reader.is_alive()
    assert (pieces, stream.answer.finish_reason) == (["a"], "cancelled")

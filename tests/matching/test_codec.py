"""Chunks are found by content among those of one codec."""

from __future__ import annotations

from types import SimpleNamespace

from blendkv.matching import ChunkFinder
from blendkv.types import Recipe, as_token_ids, chunk_key


def test_a_finder_of_another_codec_sees_its_own_chunks_only(world, text):
    prefix, raw, coded = text(20), text(64), text(64)
    world.add(raw, recipe=world.behind(prefix))
    world.add(coded, recipe=Recipe("system", tuple(prefix), "float32", "int8"))
    world.add(prefix, recipe=world.start)
    prompt = [*prefix, *raw, *coded, 1]
    assert [(m.kind, m.start, m.stop) for m in world.find(prompt)] == [("system", 0, 20), ("chunk", 20, 84)]
    finder = ChunkFinder(SimpleNamespace(index=world.index), "model", "float32", world.bos, "int8")
    finder.refresh()
    system, chunk = finder.find(prompt)  # the system prefix is raw for all
    assert (system.kind, system.key) == ("system", chunk_key("model", world.start, as_token_ids(prefix)))
    assert (chunk.start, chunk.stop, chunk.recipe.codec) == (84, 148, "int8")

"""The code in docs/ runs as written, on stand-ins for what a reader brings along."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import build, seed_of_run
from worlds import World

from blendkv.blend import SELECTORS, parse_mode
from blendkv.engines.torch.runner import TorchRunner

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)


def test_the_selector_recipe(monkeypatch):
    """`tail` takes the last tokens of the last candidates, under its own mode spec, within its budget."""
    monkeypatch.setattr(SELECTORS, "_items", dict(SELECTORS._items))
    (code,) = blocks("selectors.md")
    exec(code, {})
    seed = seed_of_run()
    print(f"seed {seed}")
    world = World.make(TorchRunner(build("llama")), random.Random(seed), chunks=4)
    report, _ = world.blend(parse_mode("blend:tail@0.3").settings)
    last = len(world.prompt) - len(world.prompt.segments[-1].token_ids)
    assert report.selector == "tail"
    assert report.recomputed_tokens > 0
    assert report.selected.tolist() == list(range(last - report.recomputed_tokens, last))
    assert report.budget_spent <= 0.3


@pytest.mark.parametrize("number", [0, 1])
def test_the_retriever_wrappers(number, llama):
    """The two lines for LangChain and for LlamaIndex, over retrievers that answer in their libraries' words."""
    texts = ["The cat sat on the mat.", "A dog lay on the rug."]
    documents = [SimpleNamespace(page_content=t, metadata={"n": i}) for i, t in enumerate(texts)]
    found_nodes = [SimpleNamespace(get_content=lambda t=t: t) for t in texts]
    names = {
        "engine": llama,
        "langchain_retriever": SimpleNamespace(invoke=lambda query: documents),
        "nodes": SimpleNamespace(retrieve=lambda query: found_nodes),
    }
    code = blocks("retrievers.md")[number]
    assert len([line for line in code.splitlines() if line]) == 2
    exec(code, names)
    found = names["retriever"].retrieve("Where is the cat?", 1)
    assert [f.chunk.text for f in found] == [f"{texts[0]}\n\n"]  # chunks carry their own blank line
    assert llama.tokenizer.decode(found[0].chunk.token_ids).strip() == texts[0]

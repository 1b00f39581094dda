"""BlendKV: chunk KV caches for RAG, computed once, blended at query time."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from blendkv.answer import Answer as Answer
    from blendkv.blend import BlendReport as BlendReport
    from blendkv.blend import BlendSettings as BlendSettings
    from blendkv.blend import blend as blend
    from blendkv.engines.base import GenerationOptions as GenerationOptions
    from blendkv.engines.torch.engine import TorchEngine as TorchEngine
    from blendkv.library import ChunkLibrary as ChunkLibrary
    from blendkv.pipeline import RagPipeline as RagPipeline
    from blendkv.prompt import PromptBuilder as PromptBuilder
    from blendkv.store.tiered import KVStore as KVStore
    from blendkv.types import ChunkKV as ChunkKV
    from blendkv.types import Prompt as Prompt
    from blendkv.types import Recipe as Recipe
    from blendkv.types import Segment as Segment

_PUBLIC = {
    "Answer": "blendkv.answer",
    "BlendReport": "blendkv.blend",
    "BlendSettings": "blendkv.blend",
    "BlendSummary": "blendkv.blend",
    "ChunkKV": "blendkv.types",
    "ChunkLibrary": "blendkv.library",
    "GenerationOptions": "blendkv.engines.base",
    "KVStore": "blendkv.store.tiered",
    "Prompt": "blendkv.types",
    "PromptBuilder": "blendkv.prompt",
    "RagPipeline": "blendkv.pipeline",
    "Recipe": "blendkv.types",
    "Segment": "blendkv.types",
    "TorchEngine": "blendkv.engines.torch.engine",
    "VllmEngine": "blendkv.engines.vllm.engine",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import public names when they are first used: ``import blendkv`` alone loads no model code."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'blendkv' has no attribute {name!r}")

"""Blending: chunk KVs put together at new positions, the selected tokens recomputed."""

from blendkv.blend.blend import BlendReport, BlendSummary, blend
from blendkv.blend.collect import collect
from blendkv.blend.select import SELECTORS, Selection, SelectionContext, register_selector
from blendkv.blend.settings import BlendSettings, Mode, parse_mode

__all__ = [
    "SELECTORS",
    "BlendReport",
    "BlendSettings",
    "BlendSummary",
    "Mode",
    "Selection",
    "SelectionContext",
    "blend",
    "collect",
    "parse_mode",
    "register_selector",
]

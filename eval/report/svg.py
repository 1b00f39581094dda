"""A matplotlib figure as SVG inside a page: real text, ids of its own, colours that follow the page's theme."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lxml import etree
from markupsafe import Markup

from blendkv.errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#3aa0d8", "#7a4fbf")
"""Okabe and Ito's colours, which colour-blind readers can tell apart, a few darkened for a white page."""

INK = "#1b1f24"
LINE = "#c9d1d9"
SOFT = "#6e7781"
_THEMED = {INK: "currentColor", LINE: "var(--line)", SOFT: "var(--soft)"}
_THEMED |= {colour: f"var(--c{at})" for at, colour in enumerate(PALETTE)}
_COLOUR = re.compile("|".join(_THEMED))
_REFERENCE = re.compile(r"#([\w-]+)")
_HREF = "{http://www.w3.org/1999/xlink}href"
_SVG = "{http://www.w3.org/2000/svg}"

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "blendkv",  # the same run is the same file
    "text.parse_math": False,  # names with a dollar sign are names, no formulas
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


def require_matplotlib() -> None:
    """Say early that the plots' library is missing.

    Raises
    ------
    MissingDependencyError
        If matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "the report's plots are drawn by matplotlib, which is not installed; run: pip install 'blendkv[eval]'"
        ) from error


@contextmanager
def page_style() -> Iterator[None]:
    """Within it, figures are drawn in the page's style, whatever the reader's own settings of matplotlib are."""
    import matplotlib

    with warnings.catch_warnings(), matplotlib.rc_context():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser's fonts draw the text, not ours
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def inline_svg(figure: Figure, name: str, label: str) -> Markup:
    """Render a figure to be put into HTML as it is.

    Parameters
    ----------
    name
        Unique within the page: matplotlib's ids are the same in every figure, so each is prefixed with it.
    label
        What the picture shows, in words, for those who do not see it.
    """
    buffer = io.BytesIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, bbox_inches="tight", pad_inches=0.04, metadata=metadata)
    parser = etree.XMLParser(remove_comments=True, resolve_entities=False, load_dtd=False, no_network=True)
    root = etree.fromstring(buffer.getvalue(), parser)
    for element in (*root.iter(f"{_SVG}metadata"), *root.iter(f"{_SVG}style")):
        parent = element.getparent()
        assert parent is not None
        parent.remove(element)
    for element in root.iter(etree.Element):
        _own(element, name)
    drawn = [value for element in root.iter(etree.Element) for key, value in element.items() if key != "id"]
    wanted = {found for value in drawn for found in _REFERENCE.findall(value)}
    for element in root.iter(etree.Element):
        if element.get("id") not in wanted:  # most: and pictures that are equal have equal ids
            element.attrib.pop("id", None)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-label", label)
    etree.cleanup_namespaces(root)
    return Markup(etree.tostring(root, encoding="unicode"))


def _own(element: etree._Element, name: str) -> None:
    """Prefix the element's ids and references to ids; name colours by the page's variables."""
    if _HREF in element.attrib:
        element.set("href", element.attrib.pop(_HREF))
    for key, value in element.items():
        if key == "id":
            element.set(key, f"{name}-{value}")
        elif key == "href" and value.startswith("#"):
            element.set(key, f"#{name}-{value[1:]}")
        elif "url(#" in value:
            element.set(key, value.replace("url(#", f"url(#{name}-"))
        if key in ("style", "fill", "stroke"):
            element.set(key, _COLOUR.sub(lambda found: _THEMED[found[0]], element.attrib[key]))

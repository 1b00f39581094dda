"""What a request says of itself: workload class, session and tenant; or what its shape says, where it is silent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blendkv.market.base import Use
from blendkv.serve.errors import ApiError

WORKLOAD_HEADER = "X-BlendKV-Workload"
SESSION_HEADER = "X-BlendKV-Session"
_WORD = re.compile(r"[\w.:@/+-]{1,128}")


@dataclass(frozen=True)
class Tag:
    """Workload class and session of a request, and whether it said so itself."""

    workload: str
    session: str
    inferred: bool

    @property
    def use(self) -> Use:
        """As the store's tiers see it."""
        return Use(self.workload, self.session)

    def headers(self) -> dict[str, str]:
        """What the response says of it."""
        return {WORKLOAD_HEADER: f"{self.workload}; inferred" if self.inferred else self.workload}


def tag_of(headers: Mapping[str, str], body: Mapping[str, Any], collection: bool) -> Tag:
    """Read the tag from the headers, then from the body's ``blendkv``; infer the class where neither names one.

    An agent offers tools or sends their results; a chat has had an answer before; what searches a collection is RAG;
    the rest are single shots.

    Parameters
    ----------
    collection
        Whether the request searches a collection.

    Raises
    ------
    ApiError
        400 if a tag is no word of 1 to 128 letters, digits and ``_.:@/+-``.
    """
    field = body.get("blendkv") if isinstance(body.get("blendkv"), dict) else {}
    assert isinstance(field, dict)
    workload = _word(headers.get(WORKLOAD_HEADER), field.get("workload"), "workload")
    session = _word(headers.get(SESSION_HEADER), field.get("session"), "session") or ""
    if workload is not None:
        return Tag(workload, session, False)
    messages = body.get("messages")
    roles = [m.get("role") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    if body.get("tools") or "tool" in roles:
        return Tag("agent", session, True)
    if "assistant" in roles:
        return Tag("chat", session, True)
    return Tag("rag" if collection else "single", session, True)


def _word(header: str | None, field: object, name: str) -> str | None:
    given = field if header is None else header
    if given is None:
        return None
    if not isinstance(given, str) or not _WORD.fullmatch(given):
        raise ApiError(400, f"{name} is {given!r:.80}; 1 to 128 letters, digits and _.:@/+- are allowed",
                       param=f"blendkv.{name}", code="invalid_value")  # fmt: skip
    return given

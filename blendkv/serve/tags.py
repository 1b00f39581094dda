"""What a request says of itself: workload class, session and tenant; or what its shape says, where it is silent."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blendkv.errors import InputError
from blendkv.market.base import Use
from blendkv.market.words import check_word
from blendkv.serve.errors import ApiError

WORKLOAD_HEADER = "X-BlendKV-Workload"
SESSION_HEADER = "X-BlendKV-Session"


@dataclass(frozen=True)
class Tag:
    """Workload class and session of a request, whether it named the class itself, and whose it is."""

    workload: str
    session: str
    inferred: bool
    tenant: str = ""

    @property
    def use(self) -> Use:
        """As the door and the store's tiers see it."""
        return Use(self.workload, session_of(self.session, self.tenant))

    def headers(self) -> dict[str, str]:
        """What the response says of it."""
        return {WORKLOAD_HEADER: f"{self.workload}; inferred" if self.inferred else self.workload}


def session_of(session: str, tenant: str) -> str:
    """A session as this server knows it: those of two tenants are two, whatever their names."""
    if not session or not tenant:
        return session
    return hashlib.blake2b(f"{tenant} {session}".encode(), digest_size=16).hexdigest()


def tag_of(headers: Mapping[str, str], body: Mapping[str, Any], collection: bool, tenant: str = "") -> Tag:
    """Read the tag from the headers, then from the body's ``blendkv``; infer the class where neither names one.

    An agent offers tools or sends their results; a chat has had an answer before; what searches a collection is RAG;
    the rest are single shots.

    Parameters
    ----------
    collection
        Whether the request searches a collection.
    tenant
        Whose key it carries.

    Raises
    ------
    ApiError
        400 if a tag is no word of 1 to 64 letters, digits and ``_.:@/+-``.
    """
    field = body.get("blendkv") if isinstance(body.get("blendkv"), dict) else {}
    assert isinstance(field, dict)
    workload = _word(headers.get(WORKLOAD_HEADER), field.get("workload"), "workload")
    session = _word(headers.get(SESSION_HEADER), field.get("session"), "session") or ""
    if workload is not None:
        return Tag(workload, session, False, tenant)
    messages = body.get("messages")
    roles = [m.get("role") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    if body.get("tools") or "tool" in roles:
        return Tag("agent", session, True, tenant)
    if "assistant" in roles:
        return Tag("chat", session, True, tenant)
    return Tag("rag" if collection else "single", session, True, tenant)


def _word(header: str | None, field: object, name: str) -> str | None:
    given = field if header is None else header
    if given is None:
        return None
    try:
        return check_word(name, given)
    except InputError as error:
        raise ApiError(400, str(error), param=f"blendkv.{name}", code="invalid_value") from None

"""``POST /v1/blendkv/hint``: what a session says of itself, for the stores' policies."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse

from blendkv.market.words import check_hint
from blendkv.serve.openai import read
from blendkv.serve.service import Service, json_body
from blendkv.serve.tags import session_of


class HintRequest(BaseModel):
    """The body."""

    model_config = ConfigDict(extra="forbid", strict=True)

    session: str
    what: str
    ttl: float = 0.0


def hint_routes(service: Service) -> APIRouter:
    """The endpoint; every store of the client is told, since a session may use several."""
    router = APIRouter(prefix="/v1/blendkv")

    @router.post("/hint")
    async def hint(request: Request) -> JSONResponse:
        asked = read(HintRequest, await json_body(request))
        what = check_hint(asked.session, asked.what, asked.ttl)
        session = session_of(asked.session, request.state.client.tenant)
        stores = service.backends_of(request).stores.values()

        def tell() -> bool:
            heard = [pipeline.hint(session, what, asked.ttl) for pipeline in stores]
            return any(heard)

        return JSONResponse({"listening": await service.thread(tell)})

    return router

"""`blendkv serve`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from blendkv.cli.common import (
    Device,
    Disk,
    Dtype,
    Json,
    Memory,
    RequireGate,
    Tenant,
    Threads,
    emit,
    err,
    set_threads,
)
from blendkv.config import parse_bytes
from blendkv.errors import InputError, MissingDependencyError
from blendkv.market.admission import LONGEST

if TYPE_CHECKING:
    from blendkv.serve.backends import Backends


def serve(
    store: Annotated[list[str], typer.Option(help="Folder of a store, or NAME=FOLDER; several are allowed.")],
    model: Annotated[str | None, typer.Option(help="Folder, hub id, or demo; the store's own by default.")] = None,
    engine: Annotated[Literal["torch", "vllm"], typer.Option(help="Who runs the model.")] = "torch",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="Name in requests; the folder's by default.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Requests must carry it; default: $BLENDKV_API_KEY.")] = None,
    api_keys: Annotated[
        Path | None, typer.Option(help="File of lines TENANT KEY [COLLECTION,...]: tenants with a share each.")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="How to use chunk KV; by default what the gate passed.")] = None,
    require_gate: RequireGate = False,
    top_k: Annotated[int, typer.Option(help="Chunks in a prompt.", min=1)] = 6,
    max_tokens: Annotated[int, typer.Option(help="Length of an answer when a request names none.")] = 256,
    max_requests: Annotated[int, typer.Option(help="Requests at once; more get 429.")] = 64,
    max_body: Annotated[str, typer.Option(help="Larger bodies get 413.")] = "32MiB",
    admission: Annotated[
        Literal["market", "fifo"], typer.Option(help="Who waits: by class, or first come, first served.")
    ] = "market",
    target: Annotated[list[str] | None, typer.Option(help="CLASS=SECONDS that a request may wait.")] = None,
    patience: Annotated[float, typer.Option(help="Longer expected waits get 429; 0: none.")] = 0.0,
    queue: Annotated[int, typer.Option(help="Requests of a tenant that wait; more get 429; 0: no limit.", min=0)] = 0,
    longest: Annotated[
        float | None, typer.Option(help=f"Who waited so long goes before any class; 0: never; default: {LONGEST:g} s.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Requests in the engine at once; 0: as it can.", min=0)] = 0,
    request_timeout: Annotated[float, typer.Option(help="Seconds until a request gets 504; 0: never.")] = 300.0,
    grace: Annotated[float, typer.Option(help="Seconds that running requests have after SIGTERM.")] = 30.0,
    embedder: Annotated[str | None, typer.Option(help="The one used at ingest; minilm by default.")] = None,
    memory: Memory = "2GB",
    disk: Disk = None,
    policy: Annotated[
        str | None, typer.Option(help="What leaves a full store first: market by default, lru, arc, gdsf, ...")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for vLLM's engine, such as max_model_len=8192.")
    ] = None,
    tenant: Tenant = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Serve an OpenAI-compatible API with retrieval until SIGTERM; see docs/serve.md."""
    from blendkv.serve.keys import check_collections, read_keys
    from blendkv.serve.settings import ServeSettings, key_from, parse_arguments, parse_stores, parse_targets
    from blendkv.serve.sockets import bind

    for name, given in (("target", target or None), ("longest", longest)):
        if given is not None and admission == "fifo":
            raise InputError(f"--{name} is for --admission market; drop it")
    if api_keys is not None and tenant is not None:
        raise InputError("--tenant is for a server of one tenant; drop it, or --api-keys")
    if policy is not None and engine == "vllm":
        raise InputError("--policy is for --engine torch; vLLM's chunks are those of blendkv daemon --policy")
    clients = {} if api_keys is None else read_keys(api_keys)
    settings = ServeSettings(
        key_from(api_key), parse_bytes(max_body), max_requests, request_timeout, grace, max_tokens, slots,
        parse_targets(target or ()) if admission == "market" else None, patience, queue,
        LONGEST if longest is None else longest, clients,
    )  # fmt: skip
    stores = parse_stores(store)
    check_collections(clients.values(), stores)
    more = parse_arguments(engine_arg or ())
    try:
        from blendkv.serve.opening import Opening, open_backends
        from blendkv.serve.server import run
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"the server needs {error.name!r}; run: pip install 'blendkv[serve]'") from error

    opening = Opening(
        stores, model, served_model_name, engine, mode, top_k, embedder, memory, disk, dtype, device, require_gate,
        more, tenant, policy,
    )  # fmt: skip
    set_threads(threads)
    with bind(host, port) as listening:
        url = f"http://{host}:{listening.getsockname()[1]}"

        def ready(backends: Backends) -> None:
            if as_json:
                row = {"url": url, "models": backends.models, "engine": engine, "stores": list(backends.stores)}
                emit("serve", [row])
                sys.stdout.flush()
            else:
                err.print(f"serving {', '.join(backends.models)} at {url}/v1", soft_wrap=True, markup=False)

        asyncio.run(run(lambda: open_backends(opening), settings, listening, ready))

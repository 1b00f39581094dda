"""vLLM's engine on the server's event loop, and vLLM's own OpenAI app around it for requests without a collection."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp

from blendkv.engines.vllm.engine import VllmEngine
from blendkv.errors import BlendKVError, EngineError, InputError
from blendkv.serve.backends import Backends, served_name
from blendkv.serve.opening import Opening, check_mode, model_of, open_pipelines


async def open_vllm(opening: Opening) -> Backends:
    """Start vLLM on the running event loop and open the store over it.

    Raises
    ------
    InputError, MissingDependencyError, StoreError
        If an option cannot be used, vLLM is not installed, or the store cannot be opened.
    EngineError
        If vLLM does not start.
    """
    if len(opening.stores) != 1:
        raise InputError(f"{len(opening.stores)} stores are given; vLLM's workers open one: run a server for each")
    check_mode(opening)
    (folder,) = opening.stores.values()
    model = model_of(opening)
    served = served_name(model, opening.served)
    arguments = VllmEngine.arguments(
        model, store=folder, dtype=opening.dtype,
        connector={"memory": opening.memory, "require_gate": opening.require_gate},
        **{"served_model_name": served, "disable_log_stats": False, **opening.engine_arguments},
    )  # fmt: skip
    llm = await _start(arguments, model)
    try:
        engine = await VllmEngine.attach(llm, model=model, store=folder)
        plain = await _own_app(llm, arguments)
        # The workers keep chunk KV in memory; here it is only counted.
        pipelines = await asyncio.to_thread(open_pipelines, opening, engine, "0")
    except BaseException:
        llm.shutdown()
        raise
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    return Backends(
        served, "vllm", pipelines, plain, serial=False, shut_down=llm.shutdown, registry=get_prometheus_registry(),
        alive=lambda: not llm.errored,
    )  # fmt: skip


async def _start(arguments: Mapping[str, Any], model: str) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        made = AsyncEngineArgs(**arguments)
    except TypeError as error:
        raise InputError(f"vLLM does not take these arguments: {error}") from error
    try:
        return AsyncLLM.from_engine_args(made)
    except BlendKVError:
        raise
    except Exception as error:
        raise EngineError(f"vLLM does not start with {model}: {error}; its log above says why") from error


async def _own_app(llm: Any, arguments: Mapping[str, Any]) -> ASGIApp:
    """The app that ``vllm serve`` would serve, made with vLLM's own functions around a running engine."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        try:
            from vllm.entrypoints.launchers.cli_args import make_arg_parser
        except ImportError:  # 0.33 has moved it
            from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError as error:
        raise EngineError(
            f"this release of vLLM keeps its OpenAI server elsewhere ({error}); vLLM 0.30 to 0.32 are known to work"
        ) from error
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--model", arguments["model"], "--served-model-name", arguments["served_model_name"]])
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    return app

"""`VllmEngine`: answers from vLLM's asynchronous engine, with its prompts blended by the connector."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from blendkv import errors
from blendkv.blend import Mode
from blendkv.engines.base import Conversation, GenerationOptions, Outcome, check_room
from blendkv.engines.fingerprint import fingerprint_folder
from blendkv.engines.folders import model_name, resolve_folder
from blendkv.engines.vllm.arguments import engine_arguments, require_vllm
from blendkv.engines.vllm.generation import VllmGeneration
from blendkv.engines.vllm.library import WorkerLibrary
from blendkv.engines.vllm.loop import EngineLoop
from blendkv.engines.vllm.requests import cache_salt, plain_params, sampling_arguments, transfer_params
from blendkv.errors import BlendKVError, EngineError, InputError, ModelLoadError, UnsupportedModelError
from blendkv.library import Library
from blendkv.store.door import Store
from blendkv.types import Prompt, RecipeKind, TokenIds

_PATIENCE = 30.0
"""Seconds that vLLM's processes have to end by themselves: a worker writes what its store still has to write."""


class VllmConversation(Conversation):
    """A conversation's name: its turns share blended KV in vLLM's prefix cache, and no other request does."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex


class VllmEngine:
    """A model in vLLM's processes, with `BlendConnector` over one store. Close it, or use ``with``.

    Many requests run at once; any thread may call. Make one with `load`, or with `attach` around an ``AsyncLLM`` of
    your own.

    Attributes
    ----------
    llm
        vLLM's ``AsyncLLM``; None once the engine is closed.
    store
        Folder of the store that the connector reads and fills.
    dtype
        Name of the dtype of weights and KV, such as ``bfloat16``.
    context
        Tokens that prompt and answer may have together.
    eos_token_ids
        Tokens that end an answer.
    codec
        How the connector stores chunk KVs.
    unsupported
        Why the model cannot be blended; full prefill still works.
    """

    def __init__(
        self, llm: Any, loop: EngineLoop, folder: Path, name: str, store: Path, described: Mapping[str, Any]
    ) -> None:
        self.llm: Any = llm
        self.name, self.store = name, store
        self._loop = loop
        self.tokenizer = load_tokenizer(folder)
        self.context = int(llm.model_config.max_model_len)
        self.dtype = str(llm.model_config.dtype).removeprefix("torch.")
        self.eos_token_ids = _end_token_ids(llm.model_config, self.tokenizer)
        self.fingerprint = fingerprint_folder(folder)
        why = described["unsupported"]
        self.unsupported: UnsupportedModelError | None = None if why is None else UnsupportedModelError(why)
        self.codec: str = described["codec"]
        self._kv_bytes: int | None = described["kv_bytes_per_token"]
        self._stored_bytes: int | None = described["stored_bytes_per_token"]
        self._finalizer = weakref.finalize(self, _shut_down, llm, loop)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        store: str | Path,
        dtype: str = "auto",
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        connector: Mapping[str, Any] | None = None,
        **engine_args: Any,
    ) -> VllmEngine:
        """Start vLLM with ``model`` and the connector, on an event loop in a thread of its own.

        Parameters
        ----------
        model
            A local folder, a hub id, or ``demo``.
        store
            Folder of the store; made where there is none.
        dtype
            ``auto``: the checkpoint's own, as for `TorchEngine`. Chunk KV of another dtype never matches.
        max_model_len, tensor_parallel_size
            As vLLM's.
        connector
            More options of the connector; see `blendkv.engines.vllm.settings.ConnectorSettings`.
        engine_args
            Any other of vLLM's ``AsyncEngineArgs``.

        Raises
        ------
        ModelLoadError, InputError, MissingDependencyError
            If an argument cannot be used, or vLLM is not installed.
        EngineError
            If vLLM does not start.
        """
        more = {"max_model_len": max_model_len, "tensor_parallel_size": tensor_parallel_size, **engine_args}
        arguments = cls.arguments(model, store=store, dtype=dtype, connector=connector, **more)
        loop = EngineLoop()
        try:
            llm = loop.call(_start(arguments))
        except Exception as error:
            loop.close(lambda: None)
            if isinstance(error, BlendKVError):
                raise
            raise EngineError(f"vLLM does not start with {model}: {error}; its log above says why") from error
        try:
            return cls._around(llm, loop, model, Path(store), loop.call(_describe(llm)))
        except BaseException:
            _shut_down(llm, loop)
            raise

    @classmethod
    def arguments(
        cls,
        model: str,
        *,
        store: str | Path,
        dtype: str = "auto",
        connector: Mapping[str, Any] | None = None,
        **engine_args: Any,
    ) -> dict[str, Any]:
        """Keyword arguments of ``AsyncEngineArgs`` for an ``AsyncLLM`` that `attach` can take; see `load`."""
        require_vllm()
        folder = resolve_folder(model)
        load_tokenizer(folder)  # what is refused is refused before vLLM starts
        place = Path(store).expanduser().absolute()
        return engine_arguments(folder, model, place, dtype, connector or {}, engine_args)

    @classmethod
    async def attach(cls, llm: Any, *, model: str, store: str | Path) -> VllmEngine:
        """Wrap an ``AsyncLLM`` that lives on the running loop, made with `arguments`. Closing it stays the caller's.

        Blocking calls then come from other threads; on this loop, use the async ones.

        Raises
        ------
        ModelLoadError, EngineError
            If the model's tokenizer cannot be used, or the workers do not answer.
        """
        described = await _describe(llm)
        loop = EngineLoop(asyncio.get_running_loop())
        return await asyncio.to_thread(cls._around, llm, loop, model, Path(store), described)

    @classmethod
    def _around(cls, llm: Any, loop: EngineLoop, model: str, store: Path, described: Mapping[str, Any]) -> VllmEngine:
        folder = resolve_folder(model)
        return cls(llm, loop, folder, model_name(model, folder), store.expanduser().absolute(), described)

    @property
    def bos_token_id(self) -> int | None:
        """The tokenizer's BOS, if it has one."""
        return self.tokenizer.bos_token_id

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers.

        Raises
        ------
        UnsupportedModelError
            If the model cannot be blended, with the cause.
        """
        return self._known(self._kv_bytes)

    @property
    def stored_bytes_per_token(self) -> int:
        """The same as the connector's codec stores them.

        Raises
        ------
        UnsupportedModelError
            If the model cannot be blended, with the cause.
        """
        return self._known(self._stored_bytes)

    def _known(self, count: int | None) -> int:
        if count is None:
            assert self.unsupported is not None
            raise self.unsupported
        return count

    def library(
        self,
        store: Store,
        kind: RecipeKind,
        system_prefix: TokenIds,
        codec: str | None = None,
        tenant: str = "",
    ) -> WorkerLibrary:
        """The chunk KVs of this engine in ``store``.

        Raises
        ------
        InputError
            If that is not the store that vLLM's workers have open, or not their codec.
        """
        if codec not in (None, self.codec):
            raise InputError(
                f"vLLM's workers store chunk KVs with codec {self.codec}, asked for {codec}: "
                f'load the engine with connector={{"codec": "{codec}"}}'
            )
        if store.path != self.store:
            raise InputError(
                f"vLLM's workers have the store {self.store} open, not {store.path}: load an engine per store"
            )
        return WorkerLibrary(self, store, kind, system_prefix, tenant)

    def conversation(self) -> VllmConversation:
        """Start a conversation, whose blended history stays in vLLM's prefix cache while there is room."""
        return VllmConversation()

    def generate(
        self,
        prompt: Prompt,
        mode: Mode,
        library: Library,
        options: GenerationOptions,
        conversation: Conversation | None = None,
    ) -> VllmGeneration:
        """A request for vLLM, sent when reading begins; see `blendkv.engines.base.Engine.generate`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        began = time.perf_counter()
        check_room(self, len(prompt))
        assert conversation is None or isinstance(conversation, VllmConversation)
        arguments = sampling_arguments(options, self.context - len(prompt))
        asked = mode if mode.settings is not None else None
        inputs: dict[str, Any] = {"prompt_token_ids": prompt.token_ids.tolist()}
        fallback: tuple[str | None, tuple[str, ...]] = (None, ())
        if asked is not None and self.unsupported is not None:
            asked, fallback = None, (str(self.unsupported), ("unsupported model",))
        if asked is not None:
            params = transfer_params(prompt, asked, library.recipe, conversation is not None)
            arguments["extra_args"] = {"kv_transfer_params": params}
            name = None if conversation is None else conversation.name
            inputs["cache_salt"] = cache_salt(prompt, asked, library.recipe, name)
        else:
            arguments["extra_args"] = {"kv_transfer_params": plain_params(conversation is not None)}
            if library.recipe.tenant:  # nor is KV of a full prefill shared between tenants: its time would tell of it
                inputs["cache_salt"] = library.recipe.tenant
        sampling = SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA)
        known = Outcome(
            "full" if asked is None else str(asked), None, *fallback, {"prepare": time.perf_counter() - began}
        )
        return VllmGeneration(self._loop, self.llm, inputs, sampling, f"blendkv-{uuid.uuid4().hex}", asked, known)

    def rpc(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of `BlendExtension` in every worker and return the first one's answer.

        Raises
        ------
        BlendKVError
            What a worker raised.
        InputError
            If the caller runs on the engine's own event loop.
        """
        return self._loop.call(_rpc(self.llm, method, *arguments))

    def close(self) -> None:
        """Abort what runs and end vLLM's processes, unless they are the caller's."""
        self._finalizer()
        self.llm = None  # or it would be shut down once more when the interpreter ends, which fails there

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _start(arguments: Mapping[str, Any]) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        made = AsyncEngineArgs(**arguments)
    except TypeError as error:
        raise InputError(f"vLLM does not take these arguments: {error}") from error
    return AsyncLLM.from_engine_args(made)


async def _rpc(llm: Any, method: str, *arguments: Any) -> dict[str, Any]:
    try:
        answers = await llm.collective_rpc(method, args=arguments)
    except Exception as error:  # vLLM passes on what a worker raised as a plain Exception
        raise EngineError(f"vLLM's workers failed in {method}: {error}; their log says why") from error
    for answer in answers:
        if "error" in answer:
            name, message = answer["error"]
            raise getattr(errors, name, EngineError)(message)
    return dict(answers[0])


async def _describe(llm: Any) -> dict[str, Any]:
    return await _rpc(llm, "blendkv_describe")


def _end_token_ids(config: Any, tokenizer: Any) -> frozenset[int]:
    own = (config.try_get_generation_config() or {}).get("eos_token_id")
    ids = own if isinstance(own, list) else [own]
    return frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)


def _shut_down(llm: Any, loop: EngineLoop) -> None:
    """End vLLM's processes and the loop that is ours. Also runs when the interpreter ends."""

    def end() -> None:
        llm.shutdown(timeout=_PATIENCE)
        multiprocessing.active_children()  # joins what had to be killed
        # vLLM closes its sockets and leaves their context, with its threads, to the garbage collector.
        context = getattr(getattr(llm.engine_core, "resources", None), "ctx", None)
        if context is not None:
            context.destroy(linger=0)

    loop.close(end)


def load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of a model folder.

    Raises
    ------
    ModelLoadError
        If there is none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # loaders of third-party files raise anything
        raise ModelLoadError(f"{folder} holds no tokenizer that can be loaded: {error}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise ModelLoadError(f"{folder} has a slow tokenizer; BlendKV needs a fast one (tokenizer.json) for offsets")
    return tokenizer

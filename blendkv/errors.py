"""The exception tree. Every message says what was given, what is allowed, and what to do next.

``InputError`` and its children are the caller's to mend: the command line exits with 2 for them and with 1
for every other ``BlendKVError``.
"""

from __future__ import annotations


class BlendKVError(Exception):
    """Root of every error that BlendKV raises on purpose."""

    exit_code = 1


class InputError(BlendKVError, ValueError):
    """The caller gave something that cannot be used."""

    exit_code = 2


class ModelLoadError(InputError):
    """A path or id is not a model that transformers can load."""


class UnsupportedModelError(InputError):
    """The model's attention cannot be blended exactly; it can still be served by full prefill."""


class PromptTooLongError(InputError):
    """The prompt has more tokens than the model's context holds."""


class DocumentError(InputError):
    """A document cannot be read: empty, binary, protected, too large, not permitted."""


class GateError(InputError):
    """The quality gate is required, and does not allow the blend that was asked for."""


class MissingDependencyError(InputError):
    """An optional package is needed for what was asked."""


class StoreMismatchError(InputError):
    """A store was made by another model, or by a newer version of BlendKV."""


class EngineError(BlendKVError):
    """An engine cannot start, or has stopped."""


class StoreError(BlendKVError):
    """The store cannot do what was asked."""


class DamagedChunkError(StoreError):
    """A stored chunk KV is truncated, altered or unreadable; recompute it."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"chunk KV {key[:12]} is damaged ({reason}); it is dropped and computed again")
        self.key = key
        self.reason = reason


class UnavailableChunkError(DamagedChunkError):
    """The rest of a chunk KV does not come: the tier it was read from is gone. Nothing is wrong with the chunk."""

    def __init__(self, key: str, reason: str) -> None:
        StoreError.__init__(self, f"chunk KV {key[:12]} cannot be read to its end ({reason}); it is computed again")
        self.key = key
        self.reason = reason


class StoreFullError(StoreError):
    """No room: the disk is full, or everything that could be evicted is pinned."""


class TierUnavailableError(StoreError):
    """A remote tier does not answer, not in time, or is left alone until it has recovered; go on without it."""

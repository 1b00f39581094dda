"""A CUDA runtime that does what a test says: no GPU is there."""

from __future__ import annotations

from enum import IntEnum


class CudaError(IntEnum):
    """The codes that tests use."""

    success = 0
    invalid_value = 1
    not_supported = 801


class ScriptedCudart:
    """As ``torch.cuda.cudart()``: notes every call, and answers with the next of ``answers``, then with success."""

    cudaError = CudaError

    def __init__(self, *answers: CudaError | Exception) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._answers = list(answers)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> CudaError:
        return self._answer("register", address, size, flags)

    def cudaHostUnregister(self, address: int) -> CudaError:
        return self._answer("unregister", address)

    def _answer(self, name: str, *arguments: int) -> CudaError:
        self.calls.append((name, arguments))
        answer = self._answers.pop(0) if self._answers else CudaError.success
        if isinstance(answer, Exception):
            raise answer
        return answer

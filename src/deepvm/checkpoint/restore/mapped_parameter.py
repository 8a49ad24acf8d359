"""A parameter and its bytes in a mapped checkpoint -> a parameter that uses them in place until training writes to it.

A copy before the first forward would delay the first loss. So ``lazy`` points the parameter at the mapping, and copies
the bytes into its own memory before the first optimizer step: writing to the mapping itself would cost a page fault for
each page, three to four times as long as the copy.
"""

from __future__ import annotations

import torch

from deepvm.checkpoint.restore.parameters import storage_uses


class MappedParameter:
    def __init__(self, parameter: torch.nn.Parameter, mapped: torch.Tensor) -> None:
        self._parameter, self._mapped = parameter, mapped
        with torch._C.DisableTorchFunctionSubclass():
            self._own = parameter.data  # the memory that was the parameter's at the restore
        self._uses: int | None = None  # of the mapping, while the parameter points at it

    def begin(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._parameter.data = self._mapped
        self._uses = storage_uses(self._mapped)

    @property
    def begun(self) -> bool:
        return self._uses is not None

    def end(self) -> bool:
        """Copy the bytes, as they are now, into the parameter's own memory. False if the mapping is still needed: there
        is a view of it. A parameter that was given other memory, shape or dtype meanwhile stays as it is."""
        if self._uses is None:
            self._own.copy_(self._mapped)
            return True
        if not _same_memory(self._parameter, self._mapped):
            return storage_uses(self._mapped) < self._uses
        if storage_uses(self._mapped) != self._uses:
            return False
        self._own.copy_(self._mapped)
        self._parameter.data = self._own
        return True


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )

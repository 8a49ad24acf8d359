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
        self._own: torch.Tensor | None = None  # the parameter's own memory, while it points at the mapping
        self._uses = 0

    def begin(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._own = self._parameter.data
            self._parameter.data = self._mapped
        self._uses = storage_uses(self._mapped)

    @property
    def begun(self) -> bool:
        return self._own is not None

    def end(self) -> bool:
        """Copy the bytes, as they are now, into the parameter's own memory. False, and nothing changed, if there is a
        view of the mapped ones or the parameter was given other memory."""
        if self._own is None:
            with torch.no_grad():
                self._parameter.copy_(self._mapped)
            return True
        if storage_uses(self._mapped) != self._uses:
            return False
        self._own.copy_(self._mapped)
        self._parameter.data = self._own
        return True

"""Parameters that use a mapped checkpoint where it lies, until training writes to them.

A copy into the parameter's own memory would stand between the start and the first loss. So a parameter is lent its
bytes in the mapping, and goes home, with that copy, before the optimizer first steps: writing to the mapping itself
would cost a fault for each page of it, three to four times as long as the copy.
"""

from __future__ import annotations

import torch

from deepvm.checkpoint.restore.parameters import uses


class MappedParameter:
    """One parameter, and the memory that it may use instead of its own."""

    def __init__(self, parameter: torch.nn.Parameter, mapped: torch.Tensor) -> None:
        self._parameter, self._mapped = parameter, mapped
        self._home: torch.Tensor | None = None
        self._uses = 0

    def begin(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._home = self._parameter.data
            self._parameter.data = self._mapped
        self._uses = uses(self._mapped)

    @property
    def begun(self) -> bool:
        return self._home is not None

    def end(self) -> bool:
        """Bring the bytes, as they are by now, home. Whether that could be: where somebody holds a view of them, or
        gave the parameter other memory, all stays as it is."""
        if self._home is None:
            with torch.no_grad():
                self._parameter.copy_(self._mapped)
            return True
        if uses(self._mapped) != self._uses:
            return False
        self._home.copy_(self._mapped)
        self._parameter.data = self._home
        return True

"""Where tensors' memory is, and what it means: compared before that memory is read.

Input: tensors, and later the same ones or others in their places. Output: whether they still have the same memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch

BLOCK = 256  # tensors: they stay in the core's cache while all of a block is compared

address_of, stride_of, _storage = torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.untyped_storage
storage_bytes = torch.UntypedStorage.nbytes
_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


class TensorMarks:
    """What differs if one of some tensors was moved in memory, or if its memory has another meaning or size now."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._blocks = [_Block(tensors[at : at + BLOCK]) for at in range(0, len(tensors), BLOCK)]

    def hold(self, tensors: list[torch.Tensor]) -> bool:
        """True if all is as it was. The caller has compared the tensors' number and classes."""
        try:
            return all(block.holds(tensors[i * BLOCK : (i + 1) * BLOCK]) for i, block in enumerate(self._blocks))
        except RuntimeError:  # a tensor without an address: sparse now
            return False


class _Block:
    """Storages are held: while they are, no other tensor gets their memory."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._addresses, self._storages = numbers(address_of, tensors), list(map(_storage, tensors))
        self._sizes = numbers(storage_bytes, self._storages)  # a storage can shrink under its tensor
        self._dtypes, known = list(map(_dtype, tensors)), dict[Any, Any]()
        self._shapes, self._strides = (
            [known.setdefault(value, value) for value in map(of, tensors)] for of in (_shape, stride_of)
        )
        self._lazy = [i for i, (t, n) in enumerate(zip(tensors, self._sizes, strict=True)) if _may_be_lazy(t, n)]

    def holds(self, tensors: list[torch.Tensor]) -> bool:
        return (
            numbers(address_of, tensors) == self._addresses
            and numbers(storage_bytes, self._storages) == self._sizes
            and list(map(_dtype, tensors)) == self._dtypes
            and list(map(stride_of, tensors)) == self._strides
            and list(map(_shape, tensors)) == self._shapes
            and not any(tensors[i].is_neg() or tensors[i].is_conj() for i in self._lazy)
        )


def numbers(of: Callable[[Any], int], values: Iterable[Any]) -> array[int]:
    return array("Q", map(of, values))


def _may_be_lazy(tensor: torch.Tensor, storage_bytes: int) -> bool:
    """True if the tensor may become a lazily conjugated or negated view of the same memory: a complex one, or a part
    of one."""
    return tensor.is_complex() or tensor.nbytes != storage_bytes

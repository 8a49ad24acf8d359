"""Calls of ours that do not depend on the modes of torch in which a user makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def without_ambient_modes() -> Iterator[None]:
    """Leave inference mode, in which parameters would get memory that no later step may write, and a default device of
    ``meta``, whose tensors have no content. Gradients stay disabled in inference mode."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if torch.get_default_device().type == "meta":
            stack.enter_context(torch.device("cpu"))
        yield

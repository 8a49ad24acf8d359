"""Options that several commands share: a function of options and a command in, a command with all of them out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def takes(options: Callable[..., tuple[Any, ...]], *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a function's options to a command, which then gets what the function returns, by these names."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        shared = inspect.signature(options, eval_str=True).parameters
        own = inspect.signature(command, eval_str=True).parameters
        kept = [p for name, p in own.items() if name not in names]

        @functools.wraps(command)
        def called(**values: Any) -> None:
            made = options(**{name: values.pop(name) for name in shared})
            command(**dict(zip(names, made, strict=True)), **values)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*kept, *shared.values())]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        del called.__wrapped__
        return called

    return add

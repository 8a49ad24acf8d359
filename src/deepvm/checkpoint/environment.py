"""What a script need not say: ``deepvm run`` tells it by environment variables, so that one script runs everywhere."""

from __future__ import annotations

import os
from collections.abc import Sequence

from deepvm import variables
from deepvm.errors import UsageError
from deepvm.policy import SavePolicy, parse_policy
from deepvm.store.base import Store, check_run
from deepvm.store.urls import open_stores

DEFAULT_RUN = "default"
DEFAULT_POLICY = "every 60s"


def env_value(name: str) -> str | None:
    """What is empty was not told."""
    return os.environ.get(name, "").strip() or None


def resolve_stores(
    given: str | Sequence[str] | Store | None, *, token: str | None, key: str | None
) -> tuple[Store, ...]:
    if given is not None and not isinstance(given, str | Sequence):
        return (given,)
    urls = given
    if urls is None:
        text = env_value(variables.STORE)
        if text is None:
            raise UsageError(
                f"nobody says where checkpoints go: give Checkpointer(state, store=URL), or set {variables.STORE} "
                "(deepvm run does), for example to file:///tmp/checkpoints"
            )
        urls = text.split()
    token, key = the_secrets(token, key)
    return open_stores(urls, token=token, key=key)


def the_secrets(token: str | None, key: str | None) -> tuple[str | None, str | None]:
    """What opens memory nodes, and a run at them."""
    return token or os.environ.get(variables.TOKEN), key or os.environ.get(variables.RUN_KEY)


def resolve_run(given: str | None) -> str:
    return check_run(given if given is not None else env_value(variables.RUN) or DEFAULT_RUN)


def resolve_policy(given: SavePolicy | str | None) -> SavePolicy:
    if given is None:
        text = env_value(variables.POLICY)
        try:
            return parse_policy(text or DEFAULT_POLICY)
        except UsageError as error:
            raise UsageError(f"{variables.POLICY}: {error}") from None
    if isinstance(given, str):
        return parse_policy(given)
    if not callable(getattr(given, "due", None)) or not hasattr(given, "deterministic"):
        raise UsageError(f"the policy is {given!r:.80}: give a text such as 'every 100 steps', or a SavePolicy")
    return given

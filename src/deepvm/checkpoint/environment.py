"""Settings that a script leaves out, from the environment variables of ``deepvm run``: one script runs everywhere."""

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
    """Return an environment variable; None if it is empty."""
    return os.environ.get(name, "").strip() or None


def resolve_stores(
    store: str | Sequence[str] | Store | None, *, token: str | None, key: str | None
) -> tuple[Store, ...]:
    if store is not None and not isinstance(store, str | Sequence):
        return (store,)
    urls = (env_value(variables.STORE) or "").split() if store is None else store
    if store is None and not urls:
        raise UsageError(
            f"no checkpoint store configured: pass Checkpointer(state, store=URL) or set {variables.STORE} "
            "(deepvm run does), for example to file:///tmp/checkpoints"
        )
    bare = [url for url in urls if "://" not in url and not url.startswith(("/", "."))] if store is None else []
    if bare and len(urls) > 1:
        raise UsageError(
            f"{variables.STORE} has {bare[0]!r}, which is not a URL: spaces separate stores; write %20 for a space"
        )
    token, key = resolve_secrets(token, key)
    return open_stores(urls, token=token, key=key)


def resolve_secrets(token: str | None, key: str | None) -> tuple[str | None, str | None]:
    """Return the token of memory nodes and the key of a run at them."""
    return token or os.environ.get(variables.TOKEN), key or os.environ.get(variables.RUN_KEY)


def resolve_run(run: str | None) -> str:
    return check_run(run if run is not None else env_value(variables.RUN) or DEFAULT_RUN)


def resolve_policy(policy: SavePolicy | str | None) -> SavePolicy:
    if policy is None:
        text = env_value(variables.POLICY)
        try:
            return parse_policy(text or DEFAULT_POLICY)
        except UsageError as error:
            raise UsageError(f"{variables.POLICY}: {error}") from None
    if isinstance(policy, str):
        return parse_policy(policy)
    if not callable(getattr(policy, "due", None)) or not hasattr(policy, "deterministic"):
        raise UsageError(f"the policy is {policy!r:.80}: pass a text such as 'every 100 steps', or a SavePolicy")
    return policy

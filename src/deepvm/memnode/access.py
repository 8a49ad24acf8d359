"""Secrets and certificates, from where they may come: files that only their owner reads, and the environment."""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Mapping
from pathlib import Path

from deepvm import variables
from deepvm.errors import UsageError


def read_token(path: Path | None, environment: Mapping[str, str] | None = None) -> str | None:
    """The token of ``--token-file``, else of the environment, else none."""
    if path is None:
        return (os.environ if environment is None else environment).get(variables.TOKEN) or None
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_IMODE(mode) & 0o077:
                raise UsageError(f"the token file {path} can be read by others: chmod 600 {path}")
            token = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the token file {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    if not token:
        raise UsageError(f"the token file {path} is empty: put some random text into it")
    return token


def client_tls(certificate: Path | str | None) -> ssl.SSLContext | None:
    """For connections to a node whose certificate is this one, or is signed by it. Nodes are often addressed by
    number, so that the certificate counts and not the name in it."""
    if certificate is None:
        return None
    context = ssl.create_default_context()
    context.check_hostname = False
    try:
        context.load_verify_locations(str(certificate))
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"the certificate {certificate} cannot be used: {error}") from None
    return context

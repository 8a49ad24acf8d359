"""Read tokens and certificates from private files and the environment, for nodes, hubs and their clients."""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Mapping
from pathlib import Path

from deepvm import variables
from deepvm.errors import UsageError


def read_token(path: Path | None, environment: Mapping[str, str] | None = None) -> str | None:
    """Read the token from ``--token-file``, else from the environment; None if neither has one."""
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
    """Trust only the certificates in this file, or signed by one of them, for connections to nodes.

    They must name the dialled host or IP address. The rule is the same for trainers, ``--status`` and other nodes.
    """
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies certificates and names, and trusts none yet
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags = ssl.VERIFY_X509_TRUSTED_FIRST | ssl.VERIFY_X509_PARTIAL_CHAIN  # alike in all Pythons
    try:
        context.load_verify_locations(str(certificate))
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise UsageError(f"the certificate {str(certificate)!r} cannot be used: {_why(error)}") from None
    return context


def server_tls(certificate: Path | str | None, key: Path | str | None) -> ssl.SSLContext | None:
    """Load the certificate and key that a node shows: its settings have both, or neither."""
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the certificate {str(certificate)!r} and its key {str(key)!r} cannot be used: {_why(error)}"
        ) from None
    return context


def _why(error: Exception) -> str:
    """Explain an error by the user's files: OpenSSL's reasons name its own source files."""
    if not isinstance(error, ssl.SSLError):
        return str(getattr(error, "strerror", None) or error)
    if "MISMATCH" in str(error.reason):
        return "the key belongs to another certificate"
    return "the file has no certificate or key in PEM form (-----BEGIN ...)"

"""Certificates of memory nodes, made with openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

BY_BOTH = "IP:127.0.0.1,DNS:localhost"


def make_certificate(directory: Path, names: str | None = BY_BOTH) -> tuple[Path, Path]:
    directory.mkdir(exist_ok=True)
    certificate, key = directory / "cert.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=node"] + ([] if names is None else ["-addext", f"subjectAltName={names}"])
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True, timeout=30
    )
    return certificate, key


def make_signed_certificate(directory: Path, names: str = BY_BOTH) -> tuple[Path, Path]:
    """Make a certificate that an authority of its own has signed, which is in no file."""
    directory.mkdir(exist_ok=True)
    signed, key, request, names_file = (directory / name for name in ("cert.pem", "key.pem", "request", "names"))
    authority, authority_key = make_certificate(directory / "authority", None)
    names_file.write_text(f"subjectAltName={names}\n")
    ask = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=signed"]
    sign = ["x509", "-req", "-days", "2", "-CAcreateserial", "-CA", authority, "-CAkey", authority_key]
    for words in (
        [*ask, "-keyout", key, "-out", request],
        [*sign, "-in", request, "-extfile", names_file, "-out", signed],
    ):
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=30)
    return signed, key

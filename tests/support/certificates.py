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

"""Catalogues by name: a name or a file in, a catalogue out. Built-in ones, and those imported on this machine."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

from deepvm.catalog import files
from deepvm.catalog.joined import SEPARATOR, joined
from deepvm.catalog.model import Catalog
from deepvm.errors import UnknownName, UsageError

DEFAULT = "aws-2026-08"
BUILT_IN = (DEFAULT, "paper-aws-2023", "paper-virtual")
STANDS_IN = f"aws is {DEFAULT} here, as no skypilot-aws is imported: deepvm catalog update --source skypilot"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


def directory() -> Path:
    """Return the folder of this user's catalogues: ``$DEEPVM_HOME/catalogs``, or the platform's data folder."""
    home = os.environ.get("DEEPVM_HOME")
    if home:
        return Path(home) / "catalogs"
    import platformdirs

    return platformdirs.user_data_path("deepvm") / "catalogs"


def names() -> list[str]:
    """List built-in catalogues first, then this user's."""
    own = sorted(p.stem for p in directory().glob("*.json")) if directory().is_dir() else []
    return [*BUILT_IN, *(name for name in own if name not in BUILT_IN)]


def load(name_or_file: str | Path = DEFAULT) -> Catalog:
    """Load a catalogue by name, or from a file (a text with a slash, or that ends in .json).

    ``gcp`` is short for ``skypilot-gcp``, ``aws`` for ``skypilot-aws`` or the built-in one, and ``aws+gcp`` joins
    both."""
    text = str(name_or_file)
    if isinstance(name_or_file, Path) or "/" in text or text.endswith(".json"):
        return files.read(Path(text))
    if text in BUILT_IN:
        resource = resources.files("deepvm.catalog") / "data" / f"{text}.json"
        return files.parse(resource.read_text(encoding="utf-8"), f"built-in catalogue {text}")
    if SEPARATOR in text:
        return load_all(*text.split(SEPARATOR))
    for name in (text, f"skypilot-{text}"):
        if _NAME.match(name) and path_of(name).is_file():
            return files.read(path_of(name))
    if text == "aws":
        built_in = load(DEFAULT)
        return replace(built_in, notes=(*built_in.notes, STANDS_IN))
    raise UnknownName("catalogue", text, names())


def load_all(*names_or_files: str | Path) -> Catalog:
    """Load catalogues and join them into one; the default one without a name."""
    return joined([load(name) for name in names_or_files or (DEFAULT,)])


def save(catalog: Catalog) -> Path:
    """Write a catalogue under its name. An older one is replaced only after the new one is complete."""
    path = path_of(catalog.name)
    files.write(catalog, path)
    return path


def path_of(name: str) -> Path:
    if not _NAME.match(name):
        raise UsageError(f"{name!r} is not a valid catalogue name: use letters, digits, dots and dashes, at most 64")
    if name in BUILT_IN:
        raise UsageError(f"{name!r} is built in: choose another name")
    return directory() / f"{name}.json"

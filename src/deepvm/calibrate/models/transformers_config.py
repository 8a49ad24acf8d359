"""A configuration file of Hugging Face's transformers -> a model on the meta device, and how one trains it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from deepvm import strict_json as strict
from deepvm.calibrate.models.registry import ModelSpec
from deepvm.errors import DeepvmError, MalformedFile

MOST_BYTES = 4 * 2**20
INSTALL = "pip install transformers"
_IMAGE = 224  # a side in pixels, if the configuration does not say


def is_config(name: str) -> bool:
    """True if a model's name is a file's."""
    return name.endswith(".json") or Path(name).is_file()


def load_config(path: str) -> tuple[str, ModelSpec]:
    """Read a configuration; return the model's name and its specification. MalformedFile if it is not one."""
    document = strict.read_file(path, most_bytes=MOST_BYTES, hint="pass the config.json of a transformers model")
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise MalformedFile(path, "not a configuration of transformers: it has no model_type")
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise DeepvmError(f"{path} is a configuration of transformers, which is not installed: {INSTALL}") from None
    document.pop("auto_map", None)  # it names code to download
    try:
        config = transformers.AutoConfig.for_model(**document)
        kind = _model_class(transformers, config)
    except Exception as error:
        raise MalformedFile(path, f"transformers cannot read it: {str(error).splitlines()[0][:200]}") from None
    name = str(getattr(config, "_name_or_path", "") or document["model_type"])

    def make() -> nn.Module:
        try:
            model: nn.Module = kind(config)
        except Exception as error:
            raise MalformedFile(path, f"transformers cannot make {kind.__name__}: {str(error)[:200]}") from None
        return model

    text = getattr(config, "get_text_config", lambda: config)()
    if hasattr(text, "vocab_size"):
        length = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 1024
        return name, ModelSpec(
            make=make, inputs=_tokens, loss=_loss, size=min(int(length), 8192), batch=1, of_text=True
        )
    side = getattr(config, "image_size", _IMAGE)
    return name, ModelSpec(
        make=make, inputs=_images, loss=_loss, size=side if isinstance(side, int) else _IMAGE, batch=8
    )


def _model_class(transformers: Any, config: Any) -> Any:
    """Return the class that the configuration names, else the one that is usual for its type."""
    for name in config.architectures or ():
        kind = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageClassification):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    return transformers.AutoModel._model_mapping[type(config)]


def _tokens(batch: int, size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    del dtype  # tokens are integers
    return {"input_ids": torch.zeros(batch, size, dtype=torch.long)}


def _images(batch: int, size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(batch, 3, size, size, dtype=dtype)}


def _loss(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Train the first result of the model, as a classifier of each token or image: the usual loss of most tasks."""
    result = model(**inputs)
    found = result[0] if not isinstance(result, torch.Tensor) else result
    flat = found.flatten(0, -2).float()
    return F.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.long))

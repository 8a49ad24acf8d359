"""The built-in models by name: how each is made, and with what it is trained.

``deepvm profile --model`` counts them on the meta device; ``workloads`` trains some of them here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from deepvm.calibrate.models import language, vision
from deepvm.errors import UnknownName


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    make: Callable[[], nn.Module]
    inputs: Callable[[int, int, torch.dtype], dict[str, torch.Tensor]]  # by batch, size and type
    loss: Callable[[nn.Module, dict[str, Any]], torch.Tensor]
    size: int  # of an image's side, or of a text in tokens
    batch: int  # of one worker, unless given
    of_text: bool = False


def image_spec(make: Callable[[], nn.Module], *, size: int = 224, batch: int = 32) -> ModelSpec:
    """Return how a classifier of images is trained."""
    return ModelSpec(make=make, inputs=vision.image_inputs, loss=vision.image_loss, size=size, batch=batch)


def text_spec(make: Callable[[], nn.Module], *, size: int, batch: int) -> ModelSpec:
    """Return how a model of tokens is trained."""
    return ModelSpec(
        make=make, inputs=language.token_inputs, loss=language.token_loss, size=size, batch=batch, of_text=True
    )


def _gpt2(width: int, layers: int, heads: int, batch: int) -> ModelSpec:
    return text_spec(partial(language.GPT2, width=width, layers=layers, heads=heads), size=1024, batch=batch)


def _llama(width: int, hidden: int, layers: int, heads: int, key_heads: int, size: int, **more: Any) -> ModelSpec:
    make = partial(language.Llama, width=width, hidden=hidden, layers=layers, heads=heads, key_heads=key_heads, **more)
    return text_spec(make, size=size, batch=1)


def _llama3(width: int, hidden: int, layers: int, heads: int) -> ModelSpec:
    return _llama(width, hidden, layers, heads, 8, 8192, vocabulary=128_256, base=500_000.0)


MODELS: Mapping[str, ModelSpec] = {
    "resnet18": image_spec(partial(vision.resnet, (2, 2, 2, 2), bottleneck=False), batch=64),
    "resnet34": image_spec(partial(vision.resnet, (3, 4, 6, 3), bottleneck=False), batch=64),
    "resnet50": image_spec(partial(vision.resnet, (3, 4, 6, 3), bottleneck=True)),
    "resnet101": image_spec(partial(vision.resnet, (3, 4, 23, 3), bottleneck=True)),
    "vgg16": image_spec(vision.vgg16),
    "efficientnet-v2-m": image_spec(vision.efficientnet_v2_m, size=384, batch=16),
    "vit-b16": image_spec(partial(vision.VisionTransformer, image=224, patch=16, width=768, layers=12, heads=12)),
    "vit-l16": image_spec(partial(vision.VisionTransformer, image=224, patch=16, width=1024, layers=24, heads=16)),
    "gpt2": _gpt2(768, 12, 12, 8),
    "gpt2-medium": _gpt2(1024, 24, 16, 4),
    "gpt2-large": _gpt2(1280, 36, 20, 2),
    "gpt2-xl": _gpt2(1600, 48, 25, 1),
    "bert-base": text_spec(partial(language.Bert, width=768, layers=12, heads=12), size=512, batch=16),
    "bert-large": text_spec(partial(language.Bert, width=1024, layers=24, heads=16), size=512, batch=8),
    "llama-7b": _llama(4096, 11_008, 32, 32, 32, 2048),
    "llama-13b": _llama(5120, 13_824, 40, 40, 40, 2048),
    "llama-70b": _llama(8192, 28_672, 80, 64, 8, 4096),
    "llama3-8b": _llama3(4096, 14_336, 32, 32),
    "llama3-70b": _llama3(8192, 28_672, 80, 64),
}
_ALIASES = {
    "llama-2-7b": "llama-7b", "llama-2-13b": "llama-13b", "llama-2-70b": "llama-70b", "llama2-70b": "llama-70b",
    "bert-base-uncased": "bert-base", "bert-large-uncased": "bert-large", "vit-b-16": "vit-b16", "vit-b/16": "vit-b16",
    "vit-l-16": "vit-l16", "llama-3-8b": "llama3-8b", "llama-3-70b": "llama3-70b", "gpt2-small": "gpt2",
    "efficientnetv2-m": "efficientnet-v2-m", "resnet-18": "resnet18", "resnet-50": "resnet50", "vgg-16": "vgg16",
}  # fmt: skip


def find_model(name: str) -> tuple[str, ModelSpec]:
    """Return a model's own name and its specification. UnknownName if there is none."""
    key = name.strip().lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    if key not in MODELS:
        raise UnknownName("model", name, MODELS)
    return key, MODELS[key]

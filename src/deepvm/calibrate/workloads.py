"""Built-in workloads: a name in; a model with random weights, random data, its optimizer and its counts out.

``compute`` and ``scaling`` train them here, so images and texts are smaller than those of ``deepvm profile --model``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from deepvm.calibrate.models import language, vision
from deepvm.calibrate.models.dry_run import Counts, dry_step, dry_update, on_meta
from deepvm.calibrate.models.registry import MODELS, ModelSpec, image_spec, text_spec
from deepvm.errors import UnknownName, UsageError

NAMES = ("resnet18", "resnet50", "efficientnet-v2-m", "gpt2", "tiny")
_SIDE = 32  # of CIFAR-10's images, with which the DeepVM paper trains ResNet-18
_VARIED = ("resnet18", "gpt2", "tiny")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    name: str
    spec: ModelSpec
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]

    def make_batch(self, samples: int, device: torch.device) -> dict[str, Tensor]:
        """Return random inputs and targets."""
        with device:
            return self.spec.inputs(samples, self.spec.size, torch.float32)

    def count_step(self, batch: int, precision: str = "fp32") -> Counts:
        """Count what one step asks of a machine, without making a tensor."""
        model = on_meta(self.spec.make)
        return dry_step(model, self.spec, batch, precision, dry_update(self.make_optimizer(model)))


def build(name: str, *, width: int | None = None, depth: int | None = None) -> Workload:
    """Return a workload. ``width`` (channels, or features) and ``depth`` (blocks in a stage, or layers) vary resnet18,
    tiny and gpt2."""
    if name not in NAMES:
        raise UnknownName("built-in workload", name, NAMES)
    if (width or depth) and name not in _VARIED:
        raise UsageError(f"{name} has one width and one depth: vary those of {', '.join(_VARIED)}")
    spec: ModelSpec
    if name == "resnet18":
        spec = image_spec(partial(vision.resnet, (depth or 2,) * 4, width=width or 64, bottleneck=False), size=_SIDE)
    elif name == "tiny":
        make = partial(vision.resnet, (depth or 1,) * 3, width=width or 16, bottleneck=False, classes=10)
        spec = image_spec(partial(make, small_images=True), size=_SIDE)
    elif name == "gpt2":
        wide = width or 768
        make_text = partial(language.GPT2, width=wide, layers=depth or 12, heads=max(1, wide // 64))
        spec = text_spec(make_text, size=256, batch=1)
    else:
        spec = replace(MODELS[name], size=224)
    return Workload(name=name, spec=spec, make_optimizer=_adamw if name == "gpt2" else _momentum)


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)

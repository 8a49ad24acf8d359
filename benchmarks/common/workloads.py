"""The states that checkpoints are taken of: models with an optimizer that has really stepped.

torch only, since every peer builds the same state in an environment of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SEED = 7


@dataclass(frozen=True, kw_only=True)
class State:
    """What a trainer would save, and a way to change all of it as training does."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor once, by a flat name; a tied one under its first name."""
        found: dict[str, torch.Tensor] = {}
        seen: set[tuple[int, torch.Size]] = set()
        for name, tensor in _flatten(self.state_dict()):
            identity = (tensor.data_ptr(), tensor.shape)
            if tensor.numel() and identity in seen:
                continue
            seen.add(identity)
            found[name] = tensor
        return found

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def new_gradients(self) -> None:
        """Other gradients than before: with the same ones Adam's averages would soon stand still, and a saver that
        skips what did not change would be measured doing nothing."""
        torch._foreach_mul_([p.grad for p in self.model.parameters() if p.grad is not None], -0.97)

    def step(self) -> None:
        self.new_gradients()
        self.optimizer.step()


def _flatten(value: Any, prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(prefix, value.detach())]
    items: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    return [found for key, item in items for found in _flatten(item, f"{prefix}.{key}" if prefix else str(key))]


def build(name: str) -> State:
    torch.manual_seed(SEED)
    model, optimizer = WORKLOADS[name]()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter).uniform_(-1e-3, 1e-3)
    state = State(name=name, model=model, optimizer=optimizer)
    state.step()  # makes the optimizer's state
    return state


# --- ResNet-50 ----------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50(classes: int = 1000) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def _resnet50_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = resnet50()
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


# --- GPT-2 small --------------------------------------------------------------------------------------------------


class GPT2Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, heads: int = 12) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.attn_proj(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp_proj(nn.functional.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 small (124 M parameters), its output layer tied to the embedding."""

    def __init__(self, width: int = 768, layers: int = 12, vocabulary: int = 50257, positions: int = 1024) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(GPT2Block(width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False, device="meta")
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of predicting each token from those before it."""
        logits = self(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _gpt2_adamw() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = GPT2()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


class LoRA(nn.Module):
    """Adapters of rank r on every attention input; the base is frozen but saved with them, as users do."""

    def __init__(self, base: GPT2, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        linears = [block.c_attn for block in base.h]
        self.a = nn.ParameterList(torch.randn(rank, linear.in_features) / rank for linear in linears)
        self.b = nn.ParameterList(torch.zeros(linear.out_features, rank) for linear in linears)


def _lora_adamw() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = LoRA(GPT2())
    return model, torch.optim.AdamW([*model.a.parameters(), *model.b.parameters()], lr=1e-4)


# --- many small tensors -------------------------------------------------------------------------------------------


def _small_adamw() -> tuple[nn.Module, torch.optim.Optimizer]:
    """1,000 parameters of 1 to 10,666 numbers; with two averages and a step count each, 4,000 tensors, 64 MB."""
    chance = random.Random(SEED)
    model = nn.ParameterList(torch.randn(chance.randint(1, 10_666)) for _ in range(1000))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


WORKLOADS: dict[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer]]] = {
    "resnet50": _resnet50_adam,
    "gpt2": _gpt2_adamw,
    "small": _small_adamw,
    "lora": _lora_adamw,
}
TITLES = {
    "resnet50": "ResNet-50 + Adam",
    "gpt2": "GPT-2 small + AdamW",
    "small": "4,000 small tensors",
    "lora": "LoRA (r = 8) on GPT-2 small",
}

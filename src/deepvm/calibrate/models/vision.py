"""Image models as their papers and torchvision have them: the same parameters, so that sizes and FLOPs are theirs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 1000
_LABELS = 10  # that every classifier has


class Residual(nn.Module):
    """ResNet's block: two or three convolutions, and the input added to their result."""

    def __init__(self, channels: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        out = width * 4 if bottleneck else width
        kernels = [(1, 1), (3, stride), (1, 1)] if bottleneck else [(3, stride), (3, 1)]
        widths = [channels, width, width, out] if bottleneck else [channels, width, out]
        parts: list[nn.Module] = []
        for i, (kernel, step) in enumerate(kernels):
            parts += [*conv_norm(widths[i], widths[i + 1], kernel, step), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*parts[:-1])
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else nn.Sequential(*conv_norm(channels, out, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def conv_norm(
    channels: int, out: int, kernel: int, stride: int, *, groups: int = 1, eps: float = 1e-5
) -> list[nn.Module]:
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out, eps=eps)]


def resnet(
    depths: tuple[int, ...], *, bottleneck: bool, width: int = 64, classes: int = CLASSES, small_images: bool = False
) -> nn.Module:
    """``width`` is that of the first stage. For small images, the first convolution keeps their size."""
    parts = [*conv_norm(3, width, 3 if small_images else 7, 1 if small_images else 2), nn.ReLU(inplace=True)]
    if not small_images:
        parts.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, depth in enumerate(depths):
        wide = width * 2**stage
        for i in range(depth):
            stride = 2 if i == 0 and stage else 1
            parts.append(Residual(channels, wide, stride, bottleneck=bottleneck))
            channels = wide * 4 if bottleneck else wide
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def vgg16() -> nn.Module:
    parts: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            parts += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        parts.append(nn.MaxPool2d(2))
    head = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 4096)]
    tail = [nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, CLASSES)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *head, *tail)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1))))
        return x * torch.sigmoid(scale)


class MobileBlock(nn.Module):
    """EfficientNet-V2's block, fused (one wide convolution) or inverted (depthwise, with squeeze and excitation)."""

    def __init__(self, channels: int, out: int, stride: int, expand: int, *, fused: bool) -> None:
        super().__init__()
        wide = channels * expand
        conv: Callable[..., list[nn.Module]] = partial(conv_norm, eps=1e-3)
        if fused and expand == 1:
            parts = [*conv(channels, out, 3, stride), nn.SiLU(inplace=True)]
        elif fused:
            parts = [*conv(channels, wide, 3, stride), nn.SiLU(inplace=True), *conv(wide, out, 1, 1)]
        else:
            parts = [
                *conv(channels, wide, 1, 1), nn.SiLU(inplace=True),
                *conv(wide, wide, 3, stride, groups=wide), nn.SiLU(inplace=True),
                SqueezeExcite(wide, max(1, channels // 4)), *conv(wide, out, 1, 1),
            ]  # fmt: skip
        self.body, self.same = nn.Sequential(*parts), stride == 1 and channels == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return x + y if self.same else y


# fused, expansion, stride, channels, blocks
_EFFICIENTNET_V2_M = (
    (True, 1, 1, 24, 3), (True, 4, 2, 48, 5), (True, 4, 2, 80, 5), (False, 4, 2, 160, 7), (False, 6, 1, 176, 14),
    (False, 6, 2, 304, 18), (False, 6, 1, 512, 5),
)  # fmt: skip


def efficientnet_v2_m() -> nn.Module:
    channels = 24
    parts: list[nn.Module] = [*conv_norm(3, channels, 3, 2, eps=1e-3), nn.SiLU(inplace=True)]
    for fused, expand, stride, out, blocks in _EFFICIENTNET_V2_M:
        for i in range(blocks):
            parts.append(MobileBlock(channels, out, stride if i == 0 else 1, expand, fused=fused))
            channels = out
    parts += [*conv_norm(channels, 1280, 1, 1, eps=1e-3), nn.SiLU(inplace=True)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(1280, CLASSES))


class VisionTransformer(nn.Module):
    def __init__(self, *, image: int, patch: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        from deepvm.calibrate.models.language import Block

        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads, causal=False, eps=1e-6) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(self.norm(x)[:, 0])
        return result


def image_loss(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    return F.cross_entropy(model(inputs["images"]).float(), inputs["labels"])


def image_inputs(batch: int, size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"images": torch.randn(batch, 3, size, size, dtype=dtype), "labels": torch.randint(0, _LABELS, (batch,))}

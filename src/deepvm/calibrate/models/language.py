"""Language models as their papers and Hugging Face have them: the same parameters, so sizes and FLOPs are theirs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_TOKENS = 30_000  # that every vocabulary has


class Attention(nn.Module):
    """Queries, keys and values in one projection, as in GPT-2."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        result: torch.Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return result


class Block(nn.Module):
    """A transformer's layer; the norms come before the parts (GPT-2, ViT), or behind them (BERT)."""

    def __init__(
        self, width: int, heads: int, *, causal: bool, eps: float = 1e-5, norm_first: bool = True, gelu: str = "none"
    ) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal=causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(gelu), nn.Linear(4 * width, width))
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=eps), nn.LayerNorm(width, eps=eps)
        self.norm_first = norm_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm_first:
            x = x + self.attention(self.norm1(x))
            result: torch.Tensor = x + self.mlp(self.norm2(x))
        else:
            x = self.norm1(x + self.attention(x))
            result = self.norm2(x + self.mlp(x))
        return result


class GPT2(nn.Module):
    def __init__(self, *, width: int, layers: int, heads: int, vocabulary: int = 50_257, context: int = 1024) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True, gelu="tanh") for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)  # tied: the head has the embedding's weights


class Bert(nn.Module):
    """BERT's encoder with its pooler (bert-base-uncased); masked tokens are predicted by the embedding's weights."""

    def __init__(self, *, width: int, layers: int, heads: int, vocabulary: int = 30_522, context: int = 512) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.segments, self.norm = nn.Embedding(2, width), nn.LayerNorm(width, eps=1e-12)
        self.blocks = nn.ModuleList(
            Block(width, heads, causal=False, eps=1e-12, norm_first=False) for _ in range(layers)
        )
        self.pooler = nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.tokens(tokens) + self.positions(places) + self.segments(torch.zeros_like(tokens)))
        for block in self.blocks:
            x = block(x)
        x = torch.cat([torch.tanh(self.pooler(x[:, :1])), x[:, 1:]], 1)
        return F.linear(x, self.tokens.weight)


class LlamaLayer(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, size = heads, key_heads, width // heads
        self.q, self.out = nn.Linear(width, heads * size, bias=False), nn.Linear(heads * size, width, bias=False)
        self.k, self.v = (nn.Linear(width, key_heads * size, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)

    def forward(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        y = self.norm1(x)
        batch, length, _ = y.shape
        q, k, v = (part(y).view(batch, length, -1, y.shape[2] // self.heads).transpose(1, 2) for part in self._parts())
        q, k = _turned(q, turns), _turned(k, turns)
        repeat = self.heads // self.key_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, -1))
        y = self.norm2(x)
        result: torch.Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result

    def _parts(self) -> tuple[nn.Module, ...]:
        return self.q, self.k, self.v


def _turned(x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate pairs of channels by their positions."""
    cosine, sine = turns
    left, right = x.chunk(2, -1)
    return x * cosine + torch.cat([-right, left], -1) * sine


class Llama(nn.Module):
    def __init__(
        self, *, width: int, hidden: int, layers: int, heads: int, key_heads: int, vocabulary: int = 32_000,
        base: float = 10_000.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens, self.size, self.base = nn.Embedding(vocabulary, width), width // heads, base
        self.layers = nn.ModuleList(LlamaLayer(width, hidden, heads, key_heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        places = torch.arange(tokens.shape[1], device=x.device, dtype=torch.float32)
        rates = self.base ** (-torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32) / self.size)
        angles = torch.outer(places, rates).repeat(1, 2)
        turns = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, turns)
        result: torch.Tensor = self.head(self.norm(x))
        return result


def token_loss(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    return F.cross_entropy(model(inputs["tokens"]).flatten(0, 1).float(), inputs["labels"].flatten())


def token_inputs(batch: int, size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    del dtype  # tokens are integers
    return {name: torch.randint(0, _TOKENS, (batch, size)) for name in ("tokens", "labels")}

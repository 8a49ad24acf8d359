"""Small models compute what their papers say: compared with plain formulas, head by head."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from deepvm.calibrate.models.language import GPT2, Bert, Llama, token_inputs, token_loss
from deepvm.calibrate.models.vision import MobileBlock, Residual, SqueezeExcite, VisionTransformer

LENGTH = 5
TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.fixture(autouse=True)
def _the_same_weights() -> None:
    torch.manual_seed(0)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """[batch, length, heads, size], head by head and token by token."""
    out = torch.zeros_like(q)
    for head in range(q.shape[2]):
        scores = q[:, :, head] @ k[:, :, head].transpose(1, 2) / math.sqrt(q.shape[-1])
        if causal:
            scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf)
        out[:, :, head] = scores.softmax(-1) @ v[:, :, head]
    return out.flatten(2)


def mixed(block: torch.nn.Module, x: torch.Tensor, *, heads: int, causal: bool) -> torch.Tensor:
    attention = block.attention
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in attention.qkv(x).chunk(3, -1))  # type: ignore[operator, union-attr]
    result: torch.Tensor = attention.out(attended(q, k, v, causal=causal))  # type: ignore[operator, union-attr]
    return result


def test_gpt2_norms_before_its_parts_and_sees_no_later_token() -> None:
    model = GPT2(width=8, layers=2, heads=2, vocabulary=11, context=LENGTH)
    x = model.tokens(TOKENS) + model.positions.weight
    for block in model.blocks:
        x = x + mixed(block, block.norm1(x), heads=2, causal=True)  # type: ignore[operator]
        x = x + block.mlp(block.norm2(x))  # type: ignore[operator]
    torch.testing.assert_close(model(TOKENS), model.norm(x) @ model.tokens.weight.T)


def test_bert_norms_behind_its_parts_and_pools_the_first_token() -> None:
    model = Bert(width=8, layers=2, heads=4, vocabulary=11, context=LENGTH)
    x = model.norm(model.tokens(TOKENS) + model.positions.weight + model.segments.weight[0])
    for block in model.blocks:
        x = block.norm1(x + mixed(block, x, heads=4, causal=False))  # type: ignore[operator]
        x = block.norm2(x + block.mlp(x))  # type: ignore[operator]
    x = torch.cat([model.pooler(x[:, :1]).tanh(), x[:, 1:]], 1)
    torch.testing.assert_close(model(TOKENS), x @ model.tokens.weight.T)


def turned(x: torch.Tensor, base: float) -> torch.Tensor:
    """Rotate each pair of channels as a complex number."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    rates = torch.tensor([base ** (-i / half) for i in range(half)])
    angles = torch.arange(LENGTH).unsqueeze(1) * rates
    found = pairs * torch.polar(torch.ones_like(angles), angles)[None, :, None]
    return torch.cat([found.real, found.imag], -1)


def test_llama_turns_queries_and_keys_and_shares_keys_among_heads() -> None:
    model = Llama(width=16, hidden=12, layers=2, heads=4, key_heads=2, vocabulary=11, base=50.0)
    x = model.tokens(TOKENS)
    for layer in model.layers:
        y = layer.norm1(x)  # type: ignore[operator]
        q, k, v = (part(y).unflatten(-1, (-1, 4)) for part in (layer.q, layer.k, layer.v))  # type: ignore[operator]
        keys, values = (part[:, :, [0, 0, 1, 1]] for part in (turned(k, 50.0), v))
        x = x + layer.out(attended(turned(q, 50.0), keys, values, causal=True))  # type: ignore[operator]
        y = layer.norm2(x)  # type: ignore[operator]
        x = x + layer.down(F.silu(layer.gate(y)) * layer.up(y))  # type: ignore[operator]
    torch.testing.assert_close(model(TOKENS), model.head(model.norm(x)), rtol=1e-4, atol=1e-5)


def test_a_vision_transformer_reads_its_class_from_the_first_place() -> None:
    model = VisionTransformer(image=8, patch=4, width=8, layers=1, heads=2)
    with torch.no_grad():
        model.first.normal_()
        model.positions.normal_()
    images = torch.randn(2, 3, 8, 8)
    patches = [model.patches(images[:, :, i : i + 4, j : j + 4]).flatten(1) for i in (0, 4) for j in (0, 4)]
    x = torch.stack([model.first[0].expand(2, 8), *patches], 1) + model.positions
    block = model.blocks[0]
    q, k, v = (part.unflatten(-1, (2, -1)) for part in block.attention.qkv(block.norm1(x)).chunk(3, -1))  # type: ignore[operator, union-attr]
    scores = torch.einsum("bqhs,bkhs->bhqk", q, k) / 2
    y = torch.einsum("bhqk,bkhs->bqhs", scores.softmax(-1), v).flatten(2)
    x = x + block.attention.out(y)  # type: ignore[operator, union-attr]
    x = x + block.mlp(block.norm2(x))  # type: ignore[operator]
    torch.testing.assert_close(model(images), model.head(model.norm(x)[:, 0]))


def test_residual_blocks_add_their_input() -> None:
    x = torch.randn(2, 8, 4, 4)
    plain = Residual(8, 8, 1, bottleneck=False).eval()
    torch.testing.assert_close(plain(x), F.relu(plain.body(x) + x))
    wider = Residual(8, 4, 2, bottleneck=True).eval()
    torch.testing.assert_close(wider(x), F.relu(wider.body(x) + wider.shortcut(x)))
    assert wider(x).shape == (2, 16, 2, 2)
    assert len(wider.body) == 8
    same, other = MobileBlock(8, 8, 1, 2, fused=True).eval(), MobileBlock(8, 8, 2, 2, fused=False).eval()
    torch.testing.assert_close(same(x), x + same.body(x))
    torch.testing.assert_close(other(x), other.body(x))


def test_squeeze_and_excitation_scales_channels_by_their_means() -> None:
    part, x = SqueezeExcite(4, 2), torch.randn(2, 4, 3, 3)
    means = x.mean((2, 3), keepdim=True)
    torch.testing.assert_close(part(x), x * torch.sigmoid(part.up(F.silu(part.down(means)))))


def test_the_loss_of_tokens_is_that_of_each_next_one() -> None:
    inputs = token_inputs(2, 7, torch.float32)
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {"tokens": (2, 7), "labels": (2, 7)}
    model = GPT2(width=8, layers=1, heads=2, vocabulary=11, context=LENGTH)
    logs = model(TOKENS).log_softmax(-1)
    expected = -logs.gather(-1, TOKENS.unsqueeze(-1)).mean()
    torch.testing.assert_close(token_loss(model, {"tokens": TOKENS, "labels": TOKENS}), expected)

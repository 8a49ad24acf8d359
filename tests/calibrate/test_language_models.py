"""Language models of the registry compute what their architectures say, on real tensors of a small size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepvm.calibrate.job import profile_model
from deepvm.calibrate.models.language import GPT2, Bert, Llama, token_inputs, token_loss

SMALL: dict[str, Any] = {"width": 32, "layers": 2, "heads": 4, "vocabulary": 50}


def small(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name == "llama":
        return Llama(**SMALL, hidden=48, key_heads=2)
    return {"gpt2": GPT2, "bert": Bert}[name](**SMALL, context=16)


@pytest.mark.parametrize(("name", "causal"), [("gpt2", True), ("llama", True), ("bert", False)])
def test_a_token_sees_later_ones_only_in_bert(name: str, causal: bool) -> None:
    model = small(name).eval()
    first = torch.randint(0, 50, (1, 12))
    second = first.clone()
    second[0, 8] = (first[0, 8] + 1) % 50
    with torch.no_grad():
        a, b = model(first), model(second)
    assert a.shape == (1, 12, 50)
    assert torch.allclose(a[:, :8], b[:, :8], atol=1e-5) == causal
    assert not torch.allclose(a[:, 8:], b[:, 8:], atol=1e-5)


def test_llama_sees_distances_and_not_places() -> None:
    model = small("llama").eval()
    text = torch.randint(0, 50, (1, 6))
    with torch.no_grad():
        layer = model.get_submodule("layers.0")
        x = model.get_submodule("tokens")(text)
        for shift in (1, 5):
            places = torch.arange(6.0)
            turns = [
                torch.outer(p, 10_000.0 ** (-torch.arange(0, 8, 2) / 8)).repeat(1, 2) for p in (places, places + shift)
            ]
            here, there = (layer(x, (t.cos(), t.sin())) for t in turns)
            assert torch.allclose(here, there, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_a_step_reaches_every_parameter_and_lowers_the_loss(name: str) -> None:
    model = small(name)
    data = {key: value % 50 for key, value in token_inputs(4, 12, torch.float32).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = token_loss(model, data)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("name", "matrices", "context", "layers", "width"),
    [
        ("bert-base", 12 * 12 * 768**2 + 30_522 * 768, 512, 12, 768),
        ("llama-7b", 32 * (4 * 4096**2 + 3 * 4096 * 11_008) + 32_000 * 4096, 2048, 32, 4096),
    ],
)
def test_flops_are_six_for_each_weight_and_token_and_the_attention(
    name: str, matrices: int, context: int, layers: int, width: int
) -> None:
    job = profile_model(name, batch=1, precision="bf16")
    attention = layers * 7 * 2 * context**2 * width
    assert job.flops_per_step == pytest.approx(6 * matrices * context + attention, rel=0.01)

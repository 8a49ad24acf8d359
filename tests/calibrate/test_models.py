"""Built-in models have the published numbers of parameters, and FLOPs and bytes that follow from them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import deepvm
from deepvm.calibrate.counting import StepCounter
from deepvm.calibrate.job import profile_model
from deepvm.calibrate.models.dry_run import on_meta
from deepvm.calibrate.models.registry import MODELS, find_model
from deepvm.cli.app import run
from deepvm.errors import DeepvmError, MalformedFile, UsageError

# torchvision's and Hugging Face's own counts
PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "vgg16": 138_357_544,
    "efficientnet-v2-m": 54_139_356,
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
}


def test_every_model_has_its_published_number_of_parameters() -> None:
    counts = {name: sum(p.numel() for p in on_meta(spec.make).parameters()) for name, spec in MODELS.items()}
    assert counts == PUBLISHED


@pytest.mark.parametrize(
    ("name", "giga_products", "size"),
    [("resnet18", 1.81, 224), ("resnet50", 4.09, 224), ("vgg16", 15.47, 224), ("vit-b16", 17.56, 224)],
)
def test_flops_of_a_step_are_three_times_the_published_forward_pass(name: str, giga_products: float, size: int) -> None:
    """A product and a sum are two; the first layer needs no gradient of its input."""
    job = profile_model(name, batch=2)
    assert MODELS[name].size == size
    assert job.flops_per_step == pytest.approx(2 * 3 * 2 * giga_products * 1e9, rel=0.03)


def test_depthwise_convolutions_count_once_for_each_channel() -> None:
    model = on_meta(lambda: torch.nn.Conv2d(64, 64, 3, padding=1, groups=64))
    inputs = torch.empty(2, 64, 16, 16, device="meta", requires_grad=True)
    counter = StepCounter(model.parameters())
    counter.start()
    model(inputs).sum().backward()
    counter.stop()
    assert counter.flops == 3 * 2 * 2 * 64 * 9 * 16 * 16


@pytest.mark.chaos
def test_flops_of_efficientnet_are_the_published_ones() -> None:
    """EfficientNet-V2-M: 24.58 G products at 480 pixels by torchvision, (384 / 480)² of that at 384."""
    job = profile_model("efficientnet-v2-m", batch=1, optimizer="sgd")
    assert job.flops_per_step == pytest.approx(2 * 3 * 24.58e9 * (384 / 480) ** 2, rel=0.03)


def test_a_transformer_takes_six_flops_for_each_parameter_and_token_and_its_attention() -> None:
    job = profile_model("gpt2", batch=1, precision="bf16")
    matrices = 12 * 12 * 768**2 + 50_257 * 768
    attention = 12 * 7 * 2 * 1024**2 * 768  # two products forward; five backward, where one is computed again
    assert job.flops_per_step == pytest.approx(6 * matrices * 1024 + attention, rel=0.01)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_bytes_by_formula_are_what_a_save_writes(optimizer: str, tmp_path: Path) -> None:
    job = profile_model("resnet18", optimizer=optimizer, batch=1)
    _, spec = find_model("resnet18")
    model = spec.make()
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor}
    options = {"momentum": 0.9} if optimizer == "sgd" else {}
    made = kinds[optimizer](model.parameters(), lr=1e-3, **options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    with deepvm.Checkpointer({"model": model, "optimizer": made}, f"file://{tmp_path}", policy="at notice") as ckpt:
        handle = ckpt.save(1)
        handle.wait("remote", timeout_s=60)
    assert job.checkpoint_bytes == pytest.approx(handle.bytes_sent, rel=0.01)


def test_memory_follows_precision_and_parallelism() -> None:
    parameters = PUBLISHED["gpt2"]
    ddp = profile_model("gpt2", batch=1)
    assert ddp.memory_parts["weights"] == ddp.memory_parts["gradients"] == ddp.memory_parts["buckets"] == 4 * parameters
    assert ddp.memory_parts["optimizer"] == pytest.approx(8 * parameters, rel=1e-4)
    assert ddp.memory_bytes == sum(ddp.memory_parts.values())
    assert ddp.sharded_bytes == 0
    fsdp = profile_model("gpt2", batch=1, precision="bf16", parallel="fsdp")
    assert fsdp.sharded_bytes == pytest.approx(16 * parameters, rel=1e-4)
    assert fsdp.memory_parts["gathered"] == 2 * 2 * 50_257 * 768  # the embedding is the largest unit
    assert fsdp.memory_parts["activations"] < 0.8 * ddp.memory_parts["activations"]
    twice = profile_model("gpt2", batch=2)
    assert twice.memory_parts["activations"] == pytest.approx(2 * ddp.memory_parts["activations"], rel=0.02)
    assert twice.flops_per_step == pytest.approx(2 * (ddp.flops_per_step or 0), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "gpt3"}, "no model is called 'gpt3': did you mean gpt2"),
        ({"precision": "fp8"}, "no precision is called 'fp8'"),
        ({"optimizer": "adma"}, "no optimizer is called 'adma': did you mean adamw"),
        ({"parallel": "magic"}, "no parallelism is called 'magic'"),
        ({"batch": 0}, "the batch is 0"),
        ({"batch": 2**30}, "the batch is 1073741824"),
    ],
)
def test_bad_names_and_numbers_are_refused(options: dict[str, object], expected: str) -> None:
    with pytest.raises(UsageError) as refused:
        profile_model(**{"name": "gpt2", **options})  # type: ignore[arg-type]
    assert expected in str(refused.value)


def test_the_command_writes_a_models_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.json"
    assert run(["profile", "--model", "resnet18", "--batch", "4", "-o", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(path.read_text())
    assert (document["parameters"], document["batch"]) == (11_689_512, 4)
    assert document["provenance"] is None
    assert {*document["origins"].values()} == {"computed"}


def config(tmp_path: Path, **change: object) -> str:
    path = tmp_path / "config.json"
    small = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 1000, "n_positions": 64}
    path.write_text(json.dumps({**small, **change}))
    return str(path)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is not None, reason="transformers is installed")
def test_a_configuration_without_transformers_names_the_command_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(DeepvmError, match="which is not installed: pip install transformers"):
        profile_model(config(tmp_path))


# transformers takes 140 MB, so the development environment does not have it
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: pip install transformers"
)


@needs_transformers
def test_a_configuration_is_built_without_weights(tmp_path: Path) -> None:
    job = profile_model(config(tmp_path), batch=2)
    assert job.parameters == 1000 * 64 + 64 * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64
    assert job.origins["flops_per_step"] == "computed"
    assert job.notes == ()


@needs_transformers
@pytest.mark.parametrize(
    ("kind", "architecture", "built_in"),
    [
        ("gpt2", "GPT2LMHeadModel", "gpt2"),
        ("bert", "BertModel", "bert-base"),
        ("vit", "ViTForImageClassification", None),
        ("llama", "LlamaForCausalLM", "llama-7b"),
        ("t5", None, None),
    ],
)
def test_the_usual_configurations_have_the_parameters_of_the_built_in_models(
    kind: str, architecture: str | None, built_in: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, "architectures": [architecture] if architecture else None}))
    job = profile_model(str(path), batch=1)
    assert job.components["model"].bytes == pytest.approx(4 * job.parameters, rel=0.01)
    if built_in is not None:
        assert job.parameters == PUBLISHED[built_in]


@needs_transformers
@pytest.mark.parametrize("change", [{"model_type": "no-such-model"}, {"n_head": 7}, {"n_layer": "many"}])
def test_a_configuration_that_transformers_refuses_is_one_sentence(change: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(MalformedFile, match="transformers cannot") as refused:
        profile_model(config(tmp_path, **change))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content in ("{}", "[]", '{"model_type": 3}', "{"):
        path.write_text(content)
        with pytest.raises(MalformedFile):
            profile_model(str(path))
    with pytest.raises(UsageError, match="cannot be read"):
        profile_model(str(tmp_path / "nothing.json"))

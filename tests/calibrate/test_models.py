"""Built-in models have the published numbers of parameters, and FLOPs and bytes that follow from them."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import deepvm
from deepvm.calibrate.counting import StepCounter
from deepvm.calibrate.job import profile_model
from deepvm.calibrate.models import registry, transformers_config
from deepvm.calibrate.models.dry_run import on_meta
from deepvm.calibrate.models.registry import MODELS, find_model
from deepvm.cli.app import run
from deepvm.errors import DeepvmError, MalformedFile, UsageError
from tests.support.golden import rounded, same_as_file

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


WHOLE: tuple[dict[str, object], ...] = (
    *({"name": name} for name in ("resnet18", "resnet50", "efficientnet-v2-m", "vgg16", "vit-b16", "gpt2")),
    *({"name": name} for name in ("bert-base", "llama-7b")),
    {"name": "llama3-8b", "precision": "bf16", "parallel": "fsdp"},
    {"name": "gpt2", "precision": "fp16", "batch": 3, "optimizer": "sgd", "parallel": "fsdp"},
    {"name": "resnet18", "precision": "bf16", "batch": 2, "optimizer": "adafactor"},
)  # fmt: skip


def test_whole_jobs_of_models_are_what_they_were() -> None:
    parts = [f"=== {options}\n{json.dumps(profile_model(**options).to_json(), indent=1)}\n" for options in WHOLE]  # type: ignore[arg-type]
    same_as_file(rounded("".join(parts)), Path(__file__).with_name("drawings") / "jobs-of-models.txt")


def test_every_model_has_a_size_and_a_batch() -> None:
    found = {name: (spec.size, spec.batch, spec.of_text) for name, spec in MODELS.items()}
    same_as_file(json.dumps(found, indent=0), Path(__file__).with_name("drawings") / "models.txt")


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


def test_a_model_that_runs_has_computed_figures_and_one_that_needs_data_guessed_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def needs_data(model: torch.nn.Module, inputs: object) -> torch.Tensor:
        raise ValueError("no data")

    spec = registry.image_spec(lambda: torch.nn.Linear(10, 4), batch=8)
    works = replace(spec, loss=lambda model, inputs: model(torch.ones(8, 10)).sum())
    monkeypatch.setattr(registry, "MODELS", {"works": works, "odd": replace(spec, loss=needs_data)})
    computed, guessed = profile_model("works"), profile_model("odd")
    assert computed.notes == ()
    assert computed.traffic_bytes_per_step is not None
    assert {*computed.origins.values()} == {"computed"}
    assert computed.origins["traffic_bytes_per_step"] == "computed"
    assert guessed.traffic_bytes_per_step is None
    assert "traffic_bytes_per_step" not in guessed.origins
    assert {name for name, origin in guessed.origins.items() if origin == "guessed"} == {
        "flops_per_step", "memory_bytes",
    }  # fmt: skip
    assert guessed.flops_per_step == 6 * 44 * 8
    assert not guessed.memory_parts.get("activations")
    assert computed.components == guessed.components
    (note,) = guessed.notes
    assert "the model cannot run without data (no data)" in note


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


class StandIn(torch.nn.Module):
    """A model of the stand-in of transformers; the real one is not installed where most tests run."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        if config.refused:
            raise ValueError("a bad number")
        self.embedding = torch.nn.Embedding(10, 4)


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A package like transformers as far as a configuration is read: configurations are their own documents."""

    def for_model(**document: object) -> SimpleNamespace:
        if document["model_type"] == "unknown":
            raise ValueError("no such type\nsecond line")
        return SimpleNamespace(**{"architectures": ["StandIn"], "refused": False, **document})

    module = SimpleNamespace(
        AutoConfig=SimpleNamespace(for_model=for_model), PreTrainedModel=torch.nn.Module, StandIn=StandIn
    )
    monkeypatch.setitem(sys.modules, "transformers", module)
    return module


@pytest.mark.parametrize(
    ("document", "name", "expected"),
    [
        ({"vocab_size": 9, "max_position_embeddings": 64}, "x", (64, 1, True)),
        ({"vocab_size": 9, "n_positions": 32, "_name_or_path": "mine"}, "mine", (32, 1, True)),
        ({"vocab_size": 9}, "x", (1024, 1, True)),
        ({"vocab_size": 9, "max_position_embeddings": 10**6}, "x", (8192, 1, True)),
        ({"image_size": 96}, "x", (96, 8, False)),
        ({"image_size": [96, 96]}, "x", (224, 8, False)),
        ({}, "x", (224, 8, False)),
    ],
)
def test_a_configuration_tells_the_size_and_the_kind_of_data(
    document: dict[str, object], name: str, expected: tuple[int, int, bool], tmp_path: Path,
    transformers: SimpleNamespace,
) -> None:  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "x", "auto_map": {"AutoConfig": "evil.py"}, **document}))
    assert transformers_config.is_config(str(path))
    found, spec = transformers_config.load_config(str(path))
    assert (found, (spec.size, spec.batch, spec.of_text)) == (name, expected)
    made = spec.make()
    assert isinstance(made, StandIn)


def test_code_of_a_configuration_is_never_loaded(tmp_path: Path, transformers: SimpleNamespace) -> None:
    read: list[object] = []
    for_model = transformers.AutoConfig.for_model
    transformers.AutoConfig.for_model = lambda **document: read.append(document) or for_model(**document)
    transformers_config.load_config(config(tmp_path, auto_map={"AutoConfig": "evil.py"}, model_type="x"))
    assert len(read) == 1
    assert "auto_map" not in str(read)


def test_a_configuration_that_cannot_be_read_or_made_is_one_sentence(
    tmp_path: Path, transformers: SimpleNamespace
) -> None:
    with pytest.raises(MalformedFile, match=r"transformers cannot read it: no such type$"):
        transformers_config.load_config(config(tmp_path, model_type="unknown"))
    _, spec = transformers_config.load_config(config(tmp_path, model_type="x", refused=True))
    with pytest.raises(MalformedFile, match="transformers cannot make StandIn: a bad number"):
        spec.make()


def test_names_of_files_are_configurations(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert [transformers_config.is_config(name) for name in ("gpt2", "x.json", str(tmp_path / "file"))] == [
        False, True, True,
    ]  # fmt: skip


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content in ("{}", "[]", '{"model_type": 3}', "{"):
        path.write_text(content)
        with pytest.raises(MalformedFile):
            profile_model(str(path))
    with pytest.raises(UsageError, match="cannot be read"):
        profile_model(str(tmp_path / "nothing.json"))

"""A checkpoint that somebody damaged, or made up, is passed over with one sentence: eager and lazy alike."""

from __future__ import annotations

import enum
import json
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import deepvm
from deepvm.checkpoint.state.layout import read_header
from deepvm.errors import CheckpointError, Corrupt
from deepvm.store import open_store
from deepvm.store.base import Manifest
from deepvm.store.verify import Verification, verify

NEVER = "every 1000000 steps"
Document = dict[str, Any]


def model() -> dict[str, Any]:
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8)
    return {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), "best": 1.5}


def save_two(root: Path) -> Path:
    """Steps 1 and 2 of run r; the manifest of step 2."""
    state = model()
    with deepvm.Checkpointer(state, f"file://{root}", run="r", policy=NEVER, on_busy="wait") as ckpt:
        for step in (1, 2):
            state["net"](torch.ones(1, 8)).sum().backward()
            state["optimizer"].step()
            ckpt.save(step).wait("durable", 30)
    return root / "r" / "step-000000000002.json"


def restored(root: Path, *, lazy: bool = False) -> Any:
    state = model()
    with deepvm.Checkpointer(state, f"file://{root}", run="r", policy=NEVER) as ckpt:
        ckpt.restore(lazy=lazy)
        state["net"](torch.ones(1, 8)).sum().backward()
        state["optimizer"].step()
        return ckpt.restored


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


MANIFESTS: dict[str, Callable[[Document], str]] = {
    "deep": lambda d: "[" * 200_000,
    "deep and closed": lambda d: "[" * 900 + "]" * 900,
    "deep facts": lambda d: json.dumps({**d, "facts": {"a": nested(60)}}),
    "a float size": lambda d: json.dumps({**d, "size_bytes": float(d["size_bytes"])}),
    "a bool size": lambda d: json.dumps({**d, "size_bytes": True}),
    "a text size": lambda d: json.dumps({**d, "size_bytes": str(d["size_bytes"])}),
    "a float chunk": lambda d: json.dumps({**d, "chunk_bytes": 1.5}),
    "no chunk": lambda d: json.dumps({**d, "chunk_bytes": 0}),
    "one huge chunk": lambda d: json.dumps({**d, "size_bytes": 2**36, "chunk_bytes": 2**36}),
    "a large chunk": lambda d: json.dumps({**d, "chunk_bytes": 8 * 2**30}),
    "a larger file": lambda d: json.dumps({**d, "size_bytes": 2**22}),
    "facts null": lambda d: json.dumps({**d, "facts": None}),
    "facts list": lambda d: json.dumps({**d, "facts": []}),
    "facts with infinity": lambda d: json.dumps({**d, "facts": {"a": 0}}).replace('"a": 0', '"a": 1e999'),
    "facts with NaN": lambda d: json.dumps({**d, "facts": {"a": float("nan")}}),
    "a lone surrogate": lambda d: json.dumps({**d, "facts": {"a": "\ud800"}}),
    "a float step": lambda d: json.dumps({**d, "step": 2.0}),
    "a negative step": lambda d: json.dumps({**d, "step": -1}),
    "a date of no calendar": lambda d: json.dumps({**d, "created_s": 1e300}),
    "a date that is text": lambda d: json.dumps({**d, "created_s": "1"}),
    "no ranks": lambda d: json.dumps({**d, "world_size": 0}),
    "ranks null": lambda d: json.dumps({**d, "world_size": None}),
    "nodes null": lambda d: json.dumps({**d, "nodes": None}),
    "nodes of numbers": lambda d: json.dumps({**d, "nodes": [1]}),
    "more replicas than nodes": lambda d: json.dumps({**d, "replicas": 3}),
    "a run that is a list": lambda d: json.dumps({**d, "run": ["r"]}),
    "digests null": lambda d: json.dumps({**d, "digests": None}),
    "digests with spaces": lambda d: json.dumps({**d, "digests": d["digests"][:8] + "  " + d["digests"][8:-2]}),
    "digests cut": lambda d: json.dumps({**d, "digests": d["digests"][:-2]}),
    "no format": lambda d: json.dumps({k: v for k, v in d.items() if k != "format"}),
    "a format that is an object": lambda d: json.dumps({**d, "format": {}}),
    "UTF-16": lambda d: json.dumps(d).encode("utf-16").decode("latin-1"),
    "cut": lambda d: json.dumps(d)[:40],
    "empty": lambda d: "",
    "a number": lambda d: "7",
}


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("damage", MANIFESTS)
def test_a_bad_manifest_is_passed_over(tmp_path: Path, damage: str, lazy: bool) -> None:
    newest = save_two(tmp_path)
    newest.write_bytes(MANIFESTS[damage](json.loads(newest.read_bytes())).encode("latin-1"))
    found = restored(tmp_path, lazy=lazy)
    assert found.step == 1
    assert len(found.passed_over) == 1
    assert found.passed_over[0].startswith("step 2 in ")
    assert found.passed_over[0].isprintable()


def test_a_huge_chunk_of_a_manifest_is_never_allocated(tmp_path: Path) -> None:
    newest = save_two(tmp_path)
    document = json.loads(newest.read_bytes())
    newest.write_text(json.dumps({**document, "chunk_bytes": 200 * 2**20}))  # within the limit, beyond the file
    tracemalloc.start()
    try:
        assert restored(tmp_path).step == 2  # one chunk, as before: nothing of it is wrong
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


# --- the file itself, with a manifest that fits it -----------------------------------------------------------------


def rewrite(manifest_path: Path, change: Callable[[Document], None], tail: bytes = b"") -> None:
    """Change the header of a checkpoint as somebody would who can write to the store: all digests fit."""
    data_path = manifest_path.with_suffix(".safetensors")
    data = data_path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 64) * 64)
    data = struct.pack("<Q", len(text)) + text + data[8 + length :] + tail
    manifest = Manifest.from_bytes(manifest_path.read_bytes())
    chunks = [data[at : at + manifest.chunk_bytes] for at in range(0, len(data), manifest.chunk_bytes)]
    document = json.loads(manifest_path.read_bytes())
    document |= {
        "size_bytes": len(data),
        "digests": struct.pack(f"={len(chunks)}Q", *map(xxhash.xxh3_64_intdigest, chunks)).hex(),
    }
    data_path.write_bytes(data)
    manifest_path.write_text(json.dumps(document))


def skeleton(change: Callable[[Document], Any]) -> Callable[[Document], None]:
    def changed(header: Document) -> None:
        saved = json.loads(header["__metadata__"]["skeleton"])
        header["__metadata__"]["skeleton"] = json.dumps([change(one) for one in saved])

    return changed


def metadata(**values: Any) -> Callable[[Document], None]:
    def changed(header: Document) -> None:
        header["__metadata__"] |= values

    return changed


def first_tensor(**fields: Any) -> Callable[[Document], None]:
    def changed(header: Document) -> None:
        name = next(name for name in header if name != "__metadata__")
        header[name] |= fields

    return changed


HEADERS: dict[str, Callable[[Document], None]] = {
    "negative shape": first_tensor(shape=[-2, -32]),
    "float shape": first_tensor(shape=[64.0]),
    "bool shape": first_tensor(shape=[True, 64]),
    "deep shape": first_tensor(shape=nested(40)),
    "no type": first_tensor(dtype=None),
    "an unknown type": first_tensor(dtype="F128"),
    "offsets null": first_tensor(data_offsets=None),
    "a tensor that is a list": lambda header: header.update({"more": []}),
    "metadata null": lambda header: header.update({"__metadata__": None}),
    "no skeleton": lambda header: header["__metadata__"].pop("skeleton"),
    "a skeleton of no rank": metadata(skeleton="[]"),
    "a skeleton that is text": metadata(skeleton='"x"'),
    "a skeleton of numbers": metadata(skeleton="[1]"),
    "a deep skeleton": metadata(skeleton='[{"net":' + "[" * 5000 + "]" * 5000 + "}]"),
    "a fairly deep skeleton": skeleton(lambda one: {**one, "net": nested(490)}),
    "the model null": skeleton(lambda one: {**one, "net": None}),
    "the model a list": skeleton(lambda one: {**one, "net": [1]}),
    "the model of unknown parts": skeleton(lambda one: {**one, "net": {"$never": 1}}),
    "the model of other tensors": skeleton(lambda one: {**one, "net": {"$module": {"weight": 3}, "versions": {}}}),
    "versions null": skeleton(lambda one: {**one, "net": {**one["net"], "versions": None}}),
    "the optimizer null": skeleton(lambda one: {**one, "optimizer": None}),
    "the optimizer text": skeleton(lambda one: {**one, "optimizer": "x"}),
    "groups of text": skeleton(lambda one: {**one, "optimizer": {**one["optimizer"], "param_groups": ["x"]}}),
    "the optimizer of a tensor that is not there": skeleton(
        lambda one: {**one, "optimizer": {**one["optimizer"], "state": {"$tensor": "never"}}}
    ),
    "unhashable keys": skeleton(lambda one: {**one, "optimizer": {"$items": [[[1], 2]]}}),
    "bad base64": skeleton(lambda one: {**one, "optimizer": {"$bytes": "é"}}),
    "a type of torch that is none": skeleton(lambda one: {**one, "optimizer": {"$dtype": "nn"}}),
    "generators null": skeleton(lambda one: {**one, "deepvm.determinism": None}),
    "generators without pieces": skeleton(lambda one: {**one, "deepvm.determinism": {"version": 1}}),
    "an order of numbers": skeleton(lambda one: {**one, "deepvm.use_order": {"net": 3}}),
    "an order that is a list": skeleton(lambda one: {**one, "deepvm.use_order": [1, 2]}),
}


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("damage", HEADERS)
def test_a_bad_header_or_state_is_passed_over(tmp_path: Path, damage: str, lazy: bool) -> None:
    newest = save_two(tmp_path)
    rewrite(newest, HEADERS[damage])
    found = restored(tmp_path, lazy=lazy)
    assert found.step == 1
    assert found.passed_over[0].startswith("step 2 in ")


TENSOR = {"$tensor": "net.weight"}
NAMED: dict[str, Any] = {
    "a function of torch": {"$dtype": "seed"},
    "a module of torch": {"$dtype": "os"},
    "a list for a type": {"$dtype": ["float32"]},
    "a tensor of a function": {"$inline": "", "dtype": "seed", "shape": [0]},
    "a stored tensor of a module": {**TENSOR, "real": "os"},
    "a device that is a number": {"$device": 0},
    "a device that is a sentence": {"$device": "cpu; rm"},
    "an array of objects": {"$numpy": TENSOR, "dtype": "|O", "shape": [1], "scalar": False},
    "an array with fields": {"$numpy": TENSOR, "dtype": [["a", "<f4"]], "shape": [1], "scalar": False},
    "an unknown tag": {"$never": 1},
}


def verified(root: Path) -> Verification:
    with closing(open_store(f"file://{root}")) as store:
        return verify(store, "r", 2)


@pytest.mark.parametrize("odd", NAMED)
def test_a_name_in_the_state_stands_for_a_type_or_a_device_and_for_nothing_else(tmp_path: Path, odd: str) -> None:
    newest = save_two(tmp_path)
    assert verified(tmp_path).good
    rewrite(newest, put_in(("best",), NAMED[odd]))
    found = verified(tmp_path)
    assert not found.chunks_bad
    assert "the saved state" in str(found.header_problem)
    assert restored(tmp_path).step == 1


# --- a restore that fails changes nothing ----------------------------------------------------------------------------

ODD: list[Any] = [None, 1.5, "x", [1], {"$bytes": "é"}]
PARTS: dict[str, tuple[str, ...]] = {
    "the optimizer": ("optimizer",),
    "the optimizer's state": ("optimizer", "state"),
    "the state of its parameters": ("optimizer", "state", "$items"),
    "its groups": ("optimizer", "param_groups"),
    "the schedule": ("schedule",),
    "the generators": ("deepvm.determinism",),
    "what was forgotten": ("deepvm.determinism", "forgotten"),
    "the devices": ("deepvm.determinism", "circumstances", "devices"),
    "the order of modules": ("deepvm.use_order",),
    "the mode": ("mode",),
}


class Mode(enum.Enum):
    WARM = "warm"
    COLD = "cold"


def scheduled() -> dict[str, Any]:
    state = model()
    schedule = torch.optim.lr_scheduler.StepLR(state["optimizer"], 1)
    return {**state, "schedule": schedule, "mode": Mode.WARM}


def save_steps(root: Path, steps: int) -> list[Path]:
    state = scheduled()
    with deepvm.Checkpointer(state, f"file://{root}", run="r", policy=NEVER, on_busy="wait") as ckpt:
        for step in range(1, steps + 1):
            state["net"](torch.ones(1, 8)).sum().backward()
            state["optimizer"].step()
            state["schedule"].step()
            ckpt.save(step).wait("durable", 30)
    return sorted((root / "r").glob("*.json"))


def put_in(path: tuple[str, ...], value: Any) -> Callable[[Document], None]:
    def change(one: Document) -> Document:
        inner = one
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        return one

    return skeleton(change)


def contents(state: dict[str, Any]) -> str:
    parts = [state["net"].state_dict(), state["optimizer"].state_dict(), state["schedule"].state_dict()]
    return repr([*parts, state["best"], state["mode"], state["optimizer"].param_groups])


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_another_form_changes_nothing(tmp_path: Path, part: str, odd: Any, lazy: bool) -> None:
    (only,) = save_steps(tmp_path, 1)
    rewrite(only, put_in(PARTS[part], odd))
    state = scheduled()
    state["net"](torch.ones(2, 8)).sum().backward()
    state["optimizer"].step()
    before, memory = contents(state), state["net"].weight.data_ptr()
    with deepvm.Checkpointer(state, f"file://{tmp_path}", run="r", policy=NEVER) as ckpt:
        with pytest.raises(CheckpointError, match="step 1 in "):
            ckpt.restore(lazy=lazy)
        assert contents(state) == before
        assert state["net"].weight.data_ptr() == memory


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_another_form_gives_way_to_the_older_step(tmp_path: Path, part: str, lazy: bool) -> None:
    rewrite(save_steps(tmp_path, 2)[1], put_in(PARTS[part], 1.5))
    state = scheduled()
    with deepvm.Checkpointer(state, f"file://{tmp_path}", run="r", policy=NEVER) as ckpt:
        ckpt.restore(lazy=lazy)
        ckpt.finish_restore()
        assert ckpt.restored.step == 1
    assert state["schedule"].last_epoch == 1


def test_what_the_optimizer_itself_refuses_changes_nothing(tmp_path: Path) -> None:
    def adam() -> dict[str, Any]:
        net = torch.nn.Linear(4, 4)
        return {"net": net, "optimizer": torch.optim.Adam(net.parameters())}

    state = adam()
    with deepvm.Checkpointer(state, f"file://{tmp_path}", run="r", policy=NEVER) as ckpt:
        state["net"](torch.ones(1, 4)).sum().backward()
        state["optimizer"].step()
        ckpt.save(1).wait("durable", 30)
    rewrite(tmp_path / "r" / "step-000000000001.json", put_in(("optimizer", "state"), {"$items": [[0, {"a": 1}]]}))
    state = adam()
    before = repr((state["net"].state_dict(), state["optimizer"].state_dict()))
    with deepvm.Checkpointer(state, f"file://{tmp_path}", run="r", policy=NEVER) as ckpt:
        with pytest.raises(CheckpointError, match="step"):
            ckpt.restore()
        assert repr((state["net"].state_dict(), state["optimizer"].state_dict())) == before


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path) -> None:
    newest = save_two(tmp_path)
    rewrite(newest, lambda header: None)
    assert restored(tmp_path).step == 2  # as it was
    rewrite(newest, lambda header: None, tail=b"trailing")
    assert restored(tmp_path).step == 1


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("odd", [3, {"version": 3, "words": {"$bytes": ""}, "gauss": None}], ids=["3", "cut"])
def test_generators_that_cannot_be_set_are_drift_and_no_failure(tmp_path: Path, odd: Any, lazy: bool) -> None:
    newest = save_two(tmp_path)
    rewrite(newest, put_in(("deepvm.determinism", "generators", "python"), odd))
    found = restored(tmp_path, lazy=lazy)
    assert found.step == 2
    assert any("generators cannot be set" in reason for reason in found.drift)


def test_where_all_are_bad_the_error_names_each(tmp_path: Path) -> None:
    newest = save_two(tmp_path)
    for path in newest.parent.glob("*.json"):
        path.write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"step 2 in .*; step 1 in "):
        restored(tmp_path)


@pytest.mark.parametrize("text", ['{"a":{"dtype":"F32","shape":[-2,-3],"data_offsets":[0,24]}}', "{}}", "{} x", "[]"])
def test_the_trainer_reads_headers_as_strictly_as_everybody(text: str) -> None:
    data = struct.pack("<Q", len(text)) + text.encode() + bytes(24)
    with pytest.raises(Corrupt):
        read_header(data, len(data))


def adam_of(**settings: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    return {"net": net, "optimizer": torch.optim.AdamW(net.parameters(), **settings)}


def stepped(state: dict[str, Any]) -> None:
    def loss() -> Any:
        state["optimizer"].zero_grad()
        found = state["net"](torch.ones(1, 8)).square().sum()
        found.backward()
        return found

    state["optimizer"].step(loss)


ODD_OPTIMIZERS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "no second moment": (("state", "$items", 0, 1, "exp_avg_sq"), {}),
    "text for a first moment": (("state", "$items", 2, 1, "exp_avg"), "x"),
    "a device for a decay": (("param_groups", 0, "weight_decay"), {"$device": "cuda:9"}),
    "no learning rate": (("param_groups", 0, "lr"), None),
    "one beta": (("param_groups", 0, "betas"), {"$tuple": [0.9]}),
    "betas of text": (("param_groups", 0, "betas"), {"$tuple": ["a", 0.9]}),
    "a device for a flag": (("param_groups", 0, "foreach"), {"$device": "cpu"}),
}


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("odd", ODD_OPTIMIZERS)
def test_an_optimizer_whose_next_step_would_fail_gives_way_to_the_older_step(
    tmp_path: Path, odd: str, lazy: bool
) -> None:
    state = adam_of()
    with deepvm.Checkpointer(state, f"file://{tmp_path}", run="r", policy=NEVER, on_busy="wait") as ckpt:
        for step in (1, 2):
            stepped(state)
            ckpt.save(step).wait("durable", 30)
    path, value = ODD_OPTIMIZERS[odd]
    rewrite(tmp_path / "r" / "step-000000000002.json", put_in(("optimizer", *path), value))
    state = adam_of()
    with deepvm.Checkpointer(state, f"file://{tmp_path}", run="r", policy=NEVER) as ckpt:
        ckpt.restore(lazy=lazy)
        stepped(state)
        assert ckpt.restored.step == 1


class Quantized(torch.optim.SGD):
    """A stranger's: its state has more than tensors and numbers, and its settings are not those of torch."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.param_groups[0].update(block=(64, None), plan={"a": [1]}, later=None, decay=0.1)

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.param_groups[0].update(later={"scale": 2}, decay=None)
        for values in self.state.values():
            values.update(scheme="int8", history=[1.0, None], scale=torch.ones(()), seen={"steps": 1})
        return found


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "Adam that is capturable, with a tensor as rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=2, line_search_fn="strong_wolfe"),
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "a stranger's": Quantized,
}


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_every_kind_are_restored_with_their_schedules(tmp_path: Path, name: str, lazy: bool) -> None:
    def made() -> dict[str, Any]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        optimizer = OPTIMIZERS[name](net.parameters())
        return {"net": net, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    state = made()
    with deepvm.Checkpointer(state, f"file://{tmp_path}", run="r", policy=NEVER) as ckpt:
        stepped(state)
        state["schedule"].step()
        ckpt.save(1).wait("durable", 30)
    again = made()
    with deepvm.Checkpointer(again, f"file://{tmp_path}", run="r", policy=NEVER) as ckpt:
        ckpt.restore(lazy=lazy)
        for one in (state, again):
            stepped(one)
        assert ckpt.restored.step == 1
    for mine, theirs in zip(state["net"].parameters(), again["net"].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)

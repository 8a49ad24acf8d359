"""What a plan's file keeps of jobs and profiles: each value up to its limit, and not beyond."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepvm.errors import UsageError
from deepvm.performance import UniversalScalability
from deepvm.performance.roofline import Load, Roofline
from deepvm.plan.job_facts import JobFacts
from deepvm.plan.profiles import Ratings
from deepvm.strict_json import MalformedJson
from tests.performance.test_job_and_profile_files import changed

LOAD = {"flops": 1e9, "traffic_bytes": 1e8, "operations": 5.0, "exchanged_bytes": 7.0}
ROOFLINE = {
    "compute_share": 0.5, "memory_share": 0.7, "operation_s": 1e-6, "exchange_bytes_per_s": 1e9, "sharpness": 2.0,
    "devices": ["T4"], "leave_one_out": {"T4": 0.1},
}  # fmt: skip
RATINGS = {
    "workload": "w", "precision": "fp16", "t4_step_s": 0.5, "notes": ["n"], "roofline": ROOFLINE, "load": LOAD,
    "machines": [
        {
            "instance": "g4dn.xlarge", "eflops": 377.0, "date": "2026-11-18", "curve_name": "amdahl",
            "curve_error": 0.1, "curve": UniversalScalability(sigma=0.1, kappa=0.0).to_spec(),
        }
    ],
}  # fmt: skip
FACTS = {
    "name": "resnet", "whole_bytes": 5, "sharded_bytes": 7, "step_low_s": 0.1, "step_high_s": 0.9,
    "origins": {"step_s": "measured"},
}  # fmt: skip
READ: dict[str, tuple[Any, dict[str, Any]]] = {
    "load": (Load.from_json, LOAD),
    "roofline": (Roofline.from_json, ROOFLINE),
    "ratings": (Ratings.from_json, RATINGS),
    "facts": (JobFacts.from_json, FACTS),
}
LIMITS: list[tuple[str, str, Any, Any]] = [
    *(("load", name, 0, -1e-9) for name in ("flops", "traffic_bytes", "operations", "exchanged_bytes")),
    *(("load", name, 1e30, 1.1e30) for name in ("flops", "traffic_bytes", "operations", "exchanged_bytes")),
    *(("roofline", name, 0, -1e-9) for name in ("compute_share", "memory_share", "operation_s")),
    *(("roofline", name, 1e30, 1.1e30) for name in ("compute_share", "memory_share", "operation_s")),
    ("roofline", "sharpness", 1.0, 0.999),
    ("roofline", "exchange_bytes_per_s", None, 0.0),
    ("roofline", "exchange_bytes_per_s", 1e-30, 9e-31),
    ("roofline", "exchange_bytes_per_s", 1e30, 1.1e30),
    ("roofline", "devices", ["d" * 200], ["d" * 201]),
    ("roofline", "leave_one_out/T4", -0.999, -0.9991),
    ("roofline", "leave_one_out/T4", 1e9, 1.1e9),
    ("ratings", "workload", "w" * 200, "w" * 201),
    ("ratings", "precision", "p" * 20, "p" * 21),
    ("ratings", "t4_step_s", 0, -1e-9),
    ("ratings", "t4_step_s", 1e9, 1e9 + 1),
    ("ratings", "t4_step_s", None, "soon"),
    ("ratings", "notes", ["n" * 2000] * 1000, ["n"] * 1001),
    ("ratings", "notes", ["n" * 2000], ["n" * 2001]),
    ("ratings", "machines/0/instance", "i" * 200, "i" * 201),
    ("ratings", "machines/0/eflops", 0, -1e-9),
    ("ratings", "machines/0/eflops", 1e12, 1e12 + 1),
    ("ratings", "machines/0/eflops", None, "many"),
    ("ratings", "machines/0/date", "d" * 40, "d" * 41),
    ("ratings", "machines/0/curve_name", "c" * 200, "c" * 201),
    ("ratings", "machines/0/curve_error", 0, -1e-9),
    ("ratings", "machines/0/curve_error", 1e9, 1e9 + 1),
    ("ratings", "machines/0/curve", None, {"model": "none"}),
    ("ratings", "load", None, []),
    ("ratings", "roofline", None, []),
    ("facts", "name", "n" * 200, "n" * 201),
    ("facts", "whole_bytes", 0, -1),
    ("facts", "whole_bytes", 2**60, 2**60 + 1),
    ("facts", "whole_bytes", None, 0.5),
    ("facts", "sharded_bytes", 0, -1),
    ("facts", "sharded_bytes", 2**60, 2**60 + 1),
    ("facts", "step_low_s", 0, -1e-9),
    ("facts", "step_low_s", 1e9, 1e9 + 1),
    ("facts", "step_high_s", 0, -1e-9),
    ("facts", "step_high_s", 1e9, 1e9 + 1),
    ("facts", "origins/step_s", "guessed", "felt"),
    ("facts", "origins", {"checkpoint_bytes": "computed"}, {"colour": "computed"}),
]


@pytest.mark.parametrize(("what", "path", "good", "bad"), LIMITS, ids=range(len(LIMITS)))
def test_each_value_has_its_limits(what: str, path: str, good: Any, bad: Any) -> None:
    read, document = READ[what]
    read(changed(document, path, good))
    with pytest.raises((MalformedJson, UsageError)):
        read(changed(document, path, bad))


@pytest.mark.parametrize("what", READ)
def test_a_document_is_written_as_it_was_read(what: str) -> None:
    read, document = READ[what]
    again = json.loads(json.dumps(read(document).to_json()))
    if what == "roofline":
        assert (again.pop("error"), again.pop("worst_error")) == (0.1, 0.1)
    if what == "ratings":
        assert (again["roofline"].pop("error"), again["roofline"].pop("worst_error")) == (0.1, 0.1)
    assert again == document

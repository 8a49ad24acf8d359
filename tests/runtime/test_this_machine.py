"""What this host tells of itself, and what a host of a cloud with GPUs would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepvm.runtime import this_machine as module
from deepvm.runtime.this_machine import here_and_now, this_machine, versions


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host whose files are in this folder; empty at first."""
    monkeypatch.setattr(module, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(module, "_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(module, "_BOARD", tmp_path / "board")
    (tmp_path / "board").mkdir()
    return tmp_path


def gpu(host: Path, number: int, text: str) -> None:
    folder = host / "gpus" / f"0000:0{number}:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text(text)


def test_a_host_that_tells_nothing_has_unknown_parts(host: Path) -> None:
    found = this_machine()
    assert found.cpu
    assert (found.instance, found.accelerator, found.accelerator_count) == (None, None, 0)
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_machine_of_ec2_with_gpus_is_known_by_its_files(host: Path) -> None:
    (host / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A CPU @ 2.50GHz\nflags: x\nmodel name: other\n")
    (host / "board" / "sys_vendor").write_text("Amazon EC2\n")
    (host / "board" / "product_name").write_text("g4dn.12xlarge\n")
    gpu(host, 0, "Model: \t NVIDIA A10G\nIRQ: 5\n")
    gpu(host, 1, "Model: Tesla T4\n")
    gpu(host, 2, "IRQ: 5\n")
    found = this_machine()
    assert (found.cpu, found.instance) == ("A CPU @ 2.50GHz", "g4dn.12xlarge")
    assert (found.accelerator, found.accelerator_count) == ("A10G", 2)


@pytest.mark.parametrize(
    ("vendor", "product"), [("QEMU", "g4dn.xlarge"), ("Amazon EC2", "not a type"), ("Amazon EC2", "xlarge")]
)
def test_other_firmware_tells_no_type(host: Path, vendor: str, product: str) -> None:
    (host / "board" / "sys_vendor").write_text(vendor)
    (host / "board" / "product_name").write_text(product)
    assert this_machine().instance is None


def test_what_is_measured_now_has_a_date_and_versions() -> None:
    found = here_and_now()
    assert found.machine == this_machine()
    assert len(found.date) >= len("2026-11-18T12:00:00")
    assert found.date[10] == "T"
    assert {"deepvm", "python", "torch", "numpy"} <= set(found.versions)


def test_a_package_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PACKAGES", ("no-such-package-at-all", "numpy"))
    assert set(versions()) == {"deepvm", "python", "numpy"}


def test_a_gpu_whose_file_cannot_be_read_is_passed_over(host: Path) -> None:
    (host / "gpus" / "0000:00:00.0" / "information").mkdir(parents=True)
    gpu(host, 1, "Model: Tesla T4\n")
    found = this_machine()
    assert (found.accelerator, found.accelerator_count) == ("T4", 1)

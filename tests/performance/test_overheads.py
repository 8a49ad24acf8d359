"""Measured overheads become the figures of a forecast, by the size of the state."""

from __future__ import annotations

import pytest

from deepvm.errors import UnknownName, UsageError
from deepvm.performance.measured import Machine, Provenance, Samples
from deepvm.performance.overheads import DEFAULTS, overhead, restore_path
from deepvm.performance.profile import OVERHEADS, OverheadPoint, Profile
from deepvm.performance.restore import IMPORT_S, RestorePath, restore_time

MB = 1_000_000
PATH = RestorePath(state_bytes=100 * MB, worker_link_bytes_per_s=1e9, node_link_bytes_per_s=1e9, first_step_s=0.5)


def profile(instance: str | None = None, **seconds: dict[int, float]) -> Profile:
    """Overheads by name: megabytes to seconds."""
    return Profile(
        workload="checkpoints",
        provenance=Provenance(machine=Machine(cpu="a cpu", cores=2, instance=instance), date="2026-11-18"),
        overheads=tuple(
            OverheadPoint(name=name, state_bytes=size * MB, seconds=Samples((taken * 0.9, taken, taken * 1.3)))
            for name, found in seconds.items()
            for size, taken in found.items()
        ),
    )


def at(name: str, megabytes: float, *profiles: Profile) -> tuple[float, str]:
    found = overhead(profiles, name, megabytes * MB)
    return pytest.approx(found.seconds, rel=1e-9), found.how  # type: ignore[return-value]


def test_measured_sizes_are_exact_and_those_between_are_interpolated() -> None:
    found = profile(restore={10: 0.1, 100: 1.0})
    assert at("restore", 10, found) == (0.1, "measured")
    assert at("restore", 55, found) == (0.55, "interpolated")


def test_times_that_grow_with_the_state_are_extrapolated_and_others_stay() -> None:
    found = profile(restore={10: 0.1, 100: 1.0}, detection={10: 0.2, 100: 0.3})
    assert at("restore", 1000, found) == (10.0, "extrapolated")
    assert at("restore", 1, found) == (0.01, "extrapolated")
    assert at("detection", 1000, found) == (0.3, "extrapolated")
    assert at("detection", 1, found) == (0.2, "extrapolated")


def test_noise_does_not_make_a_larger_state_faster() -> None:
    found = profile(restore={10: 0.3, 100: 0.2})
    assert at("restore", 1000, found) == (0.2, "extrapolated")


def test_one_size_grows_in_proportion() -> None:
    found = profile(save_remote={100: 1.02})
    assert at("save_remote", 200, found) == (2.02, "extrapolated")


def test_what_was_not_measured_has_a_default() -> None:
    assert set(DEFAULTS) == set(OVERHEADS)
    for name, (constant_s, per_byte_s) in DEFAULTS.items():
        assert at(name, 50) == (constant_s + per_byte_s * 50 * MB, "default")


def test_samples_of_several_profiles_count_together() -> None:
    found = overhead([profile(start={10: 1.0}), profile(start={10: 3.0})], "start", 10 * MB)
    assert found.seconds == pytest.approx((1.3 + 2.7) / 2)


def test_unknown_names_and_impossible_sizes_are_refused() -> None:
    with pytest.raises(UnknownName, match="restore"):
        overhead([], "restores", 1)
    with pytest.raises(UsageError):
        overhead([], "restore", -1)
    with pytest.raises(UsageError, match="read_profile"):
        restore_path(["profile.json"], PATH)  # type: ignore[list-item]


def test_a_path_without_measurements_stays() -> None:
    assert restore_path([], PATH) == (PATH, ())
    assert restore_path([profile(save_stall={10: 0.1})], PATH) == (PATH, ())


def test_measured_stages_replace_defaults_and_are_named() -> None:
    found = profile(detection={100: 0.25}, regroup={100: 0.4}, start={100: 2.0}, restore={10: 0.1, 100: 0.46})
    path, used = restore_path([found], PATH)
    assert used == ("detection", "regroup", "start", "restore")
    assert (path.detection_s, path.rendezvous_s, path.import_s, path.model_s) == (0.25, 0.4, 2.0, 0.0)
    assert path.checksum_bytes_per_s == pytest.approx(90 * MB / 0.36)
    assert path.first_step_s == 0.5
    time = restore_time(path)
    assert time.bound_by == "checksums"
    assert time.total_s == pytest.approx(0.25 + 0.4 + 2.0 + 100 / 250 + 0.5)


def test_a_first_step_counts_on_the_same_instance_only_and_its_own_profile_wins() -> None:
    own = profile("g4dn.xlarge", first_step={100: 0.7}, start={100: 5.0})
    other = profile("g5.xlarge", first_step={100: 0.1}, start={100: 9.0}, detection={100: 0.3})
    path, used = restore_path([other, own], PATH, instance="g4dn.xlarge")
    assert (path.first_step_s, path.import_s, path.detection_s) == (0.7, 5.0, 0.3)
    assert set(used) == {"first_step", "start", "detection"}
    path, used = restore_path([other], PATH, instance="p3.2xlarge")
    assert path.first_step_s == PATH.first_step_s
    assert "first_step" not in used


def test_a_start_faster_than_a_template_is_allowed() -> None:
    path, _ = restore_path([profile(start={100: 0.001})], PATH)
    assert path.template_s <= path.import_s < IMPORT_S


def test_defaults_are_these_seconds_for_nothing_and_for_a_gigabyte() -> None:
    found = {name: (overhead([], name, 0).seconds, overhead([], name, 1e9).seconds) for name in OVERHEADS}
    assert found == {
        "save_stall": (0.01, 0.01),
        "save_remote": (0.02, pytest.approx(1.62)),
        "save_durable": (0.1, pytest.approx(5.1)),
        "detection": (0.1, 0.1),
        "regroup": (1.0, 1.0),
        "start": (1.5, 1.5),
        "restore": (0.02, pytest.approx(1.62)),
        "first_step": (0.0, 0.0),
    }
    assert overhead([], "start", 5).to_json() == {"name": "start", "seconds": 1.5, "how": "default"}


def test_between_and_beyond_three_sizes_the_nearest_two_count() -> None:
    found = profile(restore={10: 0.1, 100: 1.0, 1000: 4.6}, save_stall={10: 0.2, 100: 0.1})
    assert at("restore", 100, found) == (1.0, "measured")
    assert at("restore", 550, found) == (2.8, "interpolated")
    assert at("restore", 2000, found) == (8.6, "extrapolated")
    assert at("restore", 5, found) == (0.05, "extrapolated")
    assert at("save_stall", 55, found) == (0.15, "interpolated")
    assert at("save_stall", 1000, found) == (0.1, "extrapolated")
    steep = profile(restore={100: 0.1, 200: 1.0})
    assert at("restore", 10, steep) == (0.0, "extrapolated")
    assert at("restore", 300, steep) == (1.9, "extrapolated")


def test_one_size_is_a_constant_part_and_one_that_grows() -> None:
    assert at("restore", 50, profile(restore={100: 0.01})) == (
        0.01,
        "extrapolated",
    )  # the constant is at most all of it
    assert at("restore", 50, profile(restore={0: 0.5})) == (0.5, "extrapolated")
    assert at("save_durable", 50, profile(save_durable={100: 1.1})) == (0.6, "extrapolated")


def test_a_worker_takes_in_what_was_restored_beyond_the_smallest_state() -> None:
    def rate(**restores: dict[int, float]) -> float:
        return restore_path([profile(**restores)], PATH)[0].checksum_bytes_per_s

    assert rate(restore={10: 0.1, 50: 9.0, 110: 0.6}) == pytest.approx(200 * MB)
    assert rate(restore={100: 0.5}) == pytest.approx(200 * MB)
    assert rate(restore={10: 0.5, 100: 0.4}) == pytest.approx(250 * MB)
    assert rate(restore={0: 0.5}) == PATH.checksum_bytes_per_s
    assert rate(detection={10: 0.5}) == PATH.checksum_bytes_per_s

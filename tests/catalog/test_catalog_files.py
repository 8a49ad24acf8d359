"""The catalogue file: what is written is read again, byte for byte, and what is broken is named."""

import contextlib
import dataclasses
import json
import tracemalloc
from datetime import date

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from deepvm.catalog import Catalog, Instance, Market, Prices, Quota, files, library
from deepvm.catalog.check import check
from deepvm.errors import DeepvmError, MalformedFile, UnknownName, UsageError
from deepvm.plan import Request, plan

positive = st.floats(min_value=1e-6, max_value=1e6)
names = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=12)
places = st.tuples(names.filter(lambda t: "/" not in t), st.none() | names.filter(lambda t: "/" not in t))


@st.composite
def instances(draw, name):
    accelerated = draw(st.booleans())
    return Instance(
        name=name,
        family=draw(st.none() | names),
        vcpus=draw(st.none() | positive),
        memory_gib=draw(st.none() | positive),
        accelerator=draw(names) if accelerated else None,
        accelerator_count=draw(positive) if accelerated else 0.0,
        accelerator_memory_gib=draw(st.none() | positive),
        architecture=draw(st.sampled_from([None, "x86_64", "arm64"])),
        burst_gbps=draw(st.none() | positive),
        sustained_gbps=draw(st.none() | positive),
        interruption_percent=draw(st.none() | st.tuples(st.floats(0, 50), st.floats(50, 100))),
        eflops=draw(st.none() | positive),
        speedup=draw(st.none() | st.dictionaries(names, positive, max_size=3)),
    )


@st.composite
def catalogs(draw):
    kinds = [draw(instances(n)) for n in draw(st.lists(names, unique=True, max_size=4))]
    spots = draw(st.lists(places, min_size=1, max_size=4, unique=True))
    columns = {}
    for market in draw(st.sets(st.sampled_from(Market))):
        count = draw(st.integers(0, 6)) if kinds else 0
        each = {"min_size": count, "max_size": count}
        bounds = draw(st.none() | st.lists(positive | st.just(float("nan")), **each))
        columns[market] = Prices(
            instance=np.array(draw(st.lists(st.integers(0, max(0, len(kinds) - 1)), **each)), dtype=np.int32),
            place=np.array(draw(st.lists(st.integers(0, len(spots) - 1), **each)), dtype=np.int32),
            usd_per_hour=np.array(draw(st.lists(positive, **each)), dtype=np.float64),
            usd_low=None if bounds is None else np.array(bounds, dtype=np.float64),
            seen=np.array([d.toordinal() for d in draw(st.lists(st.dates(date(2020, 1, 1)), **each))], dtype=np.int32),
        )
    return Catalog(
        name=draw(names),
        provider=draw(names),
        description=draw(names),
        instances=tuple(kinds),
        places=tuple(spots),
        prices=columns,
        quotas=tuple(
            Quota(
                families=("G", "VT"),
                market=market,
                vcpus=draw(st.floats(0, 1e5)),
                region=draw(st.none() | names),
            )
            for market in draw(st.sets(st.sampled_from(Market)))
        ),
        saturation=draw(st.sampled_from(["bandwidth", "table"])),
        notes=tuple(draw(st.lists(names, max_size=2))),
    )


def assert_same(one, other):
    for field in dataclasses.fields(Catalog):
        if field.name != "prices":
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    assert one.prices.keys() == other.prices.keys()
    for market, prices in one.prices.items():
        for field in dataclasses.fields(Prices):
            mine, theirs = getattr(prices, field.name), getattr(other.prices[market], field.name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                np.testing.assert_array_equal(mine, theirs)
                assert mine.dtype == theirs.dtype


@given(catalogs())
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_again(catalog):
    assert_same(files.parse(files.dumps(catalog), "test"), catalog)


def small():
    return Catalog(
        name="small",
        provider="aws",
        description="Two types.",
        instances=(
            Instance(name="g4dn.xlarge", family="G", vcpus=4.0, accelerator="T4", accelerator_count=1.0),
            Instance(name="c5.xlarge", vcpus=4.0, memory_gib=8.0, interruption_percent=(0, 5)),
        ),
        places=(("us-east-1", None), ("us-east-1", "us-east-1a")),
        prices={
            Market.SPOT: Prices(
                instance=np.array([0, 1], dtype=np.int32),
                place=np.array([1, 0], dtype=np.int32),
                usd_per_hour=np.array([0.1578, 0.07]),
                usd_low=np.array([0.15, np.nan]),
                seen=np.array([date(2026, 8, 22).toordinal()] * 2, dtype=np.int32),
            )
        },
        quotas=(Quota(families=("G",), market=Market.SPOT, vcpus=128),),
        notes=("A note.",),
    )


GOLDEN = """\
{
"format": "deepvm-catalog/1",
"name": "small",
"provider": "aws",
"description": "Two types.",
"saturation": "bandwidth",
"notes": ["A note."],
"quotas": [
{"families": ["G"], "market": "spot", "vcpus": 128, "region": null}
],
"instances": [
{"name": "g4dn.xlarge", "family": "G", "vcpus": 4.0, "accelerator": "T4", "accelerator_count": 1.0},
{"name": "c5.xlarge", "vcpus": 4.0, "memory_gib": 8.0, "interruption_percent": [0, 5]}
],
"places": ["us-east-1", "us-east-1/us-east-1a"],
"prices": {
"spot": {"instance": ["g4dn.xlarge", "c5.xlarge"],
"place": [1, 0],
"usd_per_hour": [0.1578, 0.07],
"usd_low": [0.15, null],
"seen": "2026-08-22"}
}
}
"""


def test_the_format_is_these_bytes(tmp_path):
    files.write(small(), tmp_path / "small.json")
    assert (tmp_path / "small.json").read_bytes() == GOLDEN.encode()
    assert_same(files.read(tmp_path / "small.json"), small())


def test_missing_data_stays_missing():
    spot = list(files.parse(GOLDEN, "golden").offers("c5.xlarge"))
    assert spot[0].usd_low is None
    assert spot[0].usd_high is None
    assert files.parse(GOLDEN, "golden").instance("g4dn.xlarge").memory_gib is None


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"name": "small",', '"name": "small"', "line 4"),
        ("deepvm-catalog/1", "deepvm-catalog/9", "deepvm-catalog/9"),
        ('"format": "deepvm-catalog/1",', "", "format"),
        ('["g4dn.xlarge", "c5.xlarge"]', '["g4dn.xlarge", "c9.xlarge"]', "c9.xlarge"),
        ("0.07]", "NaN]", "NaN is not JSON"),
        ("0.07]", "-0.07]", "usd_per_hour has -0.07, not a number from 1e-06"),
        ("0.07]", "1e999]", "not a finite number"),
        ("[0.1578, 0.07]", "[0.1578]", "2 instances have 1 values of usd_per_hour"),
        ("[0.1578, 0.07]", '[0.1578, "dear"]', "not a valid deepvm-catalog/1"),
        ("[1, 0]", "[1, 7]", "place"),
        ("[1, 0]", "[1, -1]", "place"),
        ("[1, 0]", "[1]", "place"),
        ("[0.15, null]", "[0.15]", "2 instances have 1 values of usd_low"),
        ('"seen": "2026-08-22"', '"seen": "yesterday"', "not a valid deepvm-catalog/1"),
        ('"seen": "2026-08-22"', '"seen": ["2026-08-22"]', "one day per price"),
        ('"vcpus": 128', '"vcpus": -1', "quota"),
        ('"market": "spot"', '"market": "grey"', "grey"),
        ('"memory_gib": 8.0', '"memory_gib": 0', "memory_gib"),
        ('"memory_gib": 8.0', '"memory": 8.0', "'memory' of 'c5.xlarge' is an unknown field"),
        ('"name": "c5.xlarge"', '"name": "g4dn.xlarge"', "twice"),
        ('"accelerator": "T4", ', "", "accelerator"),
        ('"provider": "aws",', "", "provider"),
        ('"saturation": "bandwidth"', '"saturation": "magic"', "magic"),
        ('["us-east-1", ', '["", ', "region"),
        ('"deepvm-catalog/1"', "9" * 5000, "not valid JSON"),
        ('"deepvm-catalog/1"', '{"a": [1]}', "its format is {'a': [1]}"),
        ('"accelerator": "T4"', '"accelerator": 5', "'accelerator' of 'g4dn.xlarge' is 5, which is not text"),
        ('"family": "G"', '"family": 7', "'family' of 'g4dn.xlarge' is 7, which is not text"),
        ('"family": "G"', '"speedup": 7', "'speedup' of 'g4dn.xlarge' is 7, not an object"),
        ('"vcpus": 4.0', '"vcpus": true', "'vcpus' of 'g4dn.xlarge' is True"),
        ('"vcpus": 4.0', '"eflops": 1e308', "'eflops' of 'g4dn.xlarge' is 1e+308, not a number from 1e-09 to 1e+09"),
        ("[0, 5]", '["a", 5]', "'interruption_percent' of 'c5.xlarge' has 'a'"),
        ("[0, 5]", "[5]", "not two percentages"),
        ('"families": ["G"]', '"families": [null]', "the families of a quota has None, which is not text"),
        ('"families": ["G"]', '"families": 4', "the families of a quota is 4, not a list"),
        ('"region": null', '"region": [[]]', "region is [[]], which is not text"),
        ("[1, 0]", f"[1, {10**400}]", "place has 10000"),
        ("[1, 0]", "[1, true]", "place has True, not an integer"),
        ("0.07]", "5e-324]", "usd_per_hour has 5e-324, not a number from 1e-06 to 1e+06"),
        ('"notes": ["A note."]', '"notes": [3]', "notes has 3, which is not text"),
    ],
)
def test_a_broken_file_is_named_with_its_problem(old, new, told):
    assert old in GOLDEN
    with pytest.raises(MalformedFile, match=r"^here\.json") as caught:
        files.parse(GOLDEN.replace(old, new, 1), "here.json")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n\0\0", b"\xff\xfe{}", b"[]", b"null", b"[" * 100_000])
def test_what_is_no_catalogue_is_refused(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(MalformedFile):
        library.load(tmp_path / "x.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(json.loads(GOLDEN))), json_values)
@settings(max_examples=200, deadline=None)
def test_any_wrong_field_is_an_error_of_ours(field, value):
    document = {**json.loads(GOLDEN), field: value}
    with contextlib.suppress(DeepvmError):
        files.parse(json.dumps(document), "test")


@pytest.mark.parametrize("path", ["/dev/zero", "sparse"])
def test_a_file_without_an_end_is_read_up_to_a_limit(tmp_path, monkeypatch, path):
    monkeypatch.setattr(files, "MOST_BYTES", 2**16)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(6 * 2**30)
    tracemalloc.start()
    with pytest.raises(MalformedFile, match="more than 65,536 bytes"):
        library.load(tmp_path / path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def leaves(value, path=()):
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from leaves(part, (*path, key))


def with_leaf(value, path, new):
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = with_leaf(value[path[0]], path[1:], new)
    return copied


@given(st.sampled_from(list(leaves(json.loads(GOLDEN)))), json_values)
@settings(max_examples=300, deadline=None)
def test_a_wrong_value_at_any_depth_is_an_error_of_ours_also_in_a_check_and_a_plan(path, value):
    text = json.dumps(with_leaf(json.loads(GOLDEN), path, value))
    with contextlib.suppress(DeepvmError):
        catalog = files.parse(text, "test")
        check(catalog, date(2026, 8, 22))
        plan(catalog, Request(budget_usd=3.0, checkpoint_bytes=10**8))


def test_a_file_that_is_not_there_is_reported(tmp_path):
    with pytest.raises(MalformedFile, match="cannot be read"):
        library.load(tmp_path / "absent.json")


def test_an_unknown_name_gets_the_nearest_one(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPVM_HOME", str(tmp_path))
    with pytest.raises(UnknownName, match="did you mean aws-2026-08"):
        library.load("aws-2026-8")


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 65, "aws-2026-08"])
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setenv("DEEPVM_HOME", str(tmp_path))
    with pytest.raises(UsageError):
        library.save(dataclasses.replace(small(), name=name))
    assert not list(tmp_path.rglob("*.json"))


def test_own_catalogues_are_kept_and_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPVM_HOME", str(tmp_path))
    path = library.save(small())
    assert path == tmp_path / "catalogs" / "small.json"
    assert library.names() == [*library.BUILT_IN, "small"]
    assert_same(library.load("small"), small())
    assert [p.name for p in path.parent.iterdir()] == ["small.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "small.json"
    files.write(small(), path)
    monkeypatch.setattr(files.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        files.write(dataclasses.replace(small(), description="new"), path)
    assert path.read_text() == GOLDEN
    assert list(tmp_path.iterdir()) == [path]

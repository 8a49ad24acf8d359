"""``deepvm catalog``: what people see, what programs read, and how each mistake ends."""

import dataclasses
import json
import os

import numpy as np
import pytest

from deepvm.catalog import library
from deepvm.cli import catalog as commands
from deepvm.cli.app import run

HEADER = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPVM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def deepvm(capsys):
    def call(*words, code=0):
        assert run(["catalog", *map(str, words)]) == code
        return capsys.readouterr()

    return call


@pytest.fixture
def as_json(deepvm):
    def call(*words, code=0):
        result = deepvm(*words, "--json", code=code)
        return json.loads(result.out)

    return call


@pytest.fixture
def vms(tmp_path):
    path = tmp_path / "vms.csv"
    rows = ("c5.xlarge,,,4,8,,0.17,0.07,us-east-1,a", "m5.xlarge,,,4,16,,0.2,0.3,us-east-1,a", ",TPU,1,,,,1,1,r,a")
    path.write_text("\n".join((HEADER, *rows)))
    return path


def test_list_shows_the_built_in_ones_with_the_day_of_their_prices(deepvm, as_json):
    shown = deepvm("list").out
    for name in library.BUILT_IN:
        assert name in shown
    assert "2026-08-22" in shown
    document = as_json("list")["catalogs"]
    assert [c["name"] for c in document] == list(library.BUILT_IN)
    assert document[0]["prices_seen"] == {"oldest": "2026-08-22", "newest": "2026-08-22"}
    assert (document[0]["types"], document[0]["accelerated_types"], document[0]["offers"]) == (41, 22, 82)


def test_a_broken_catalogue_does_not_hide_the_others(deepvm, as_json):
    library.directory().mkdir(parents=True)
    (library.directory() / "broken.json").write_text("{")
    assert "aws-2026-08" in deepvm("list").out
    last = as_json("list")["catalogs"][-1]
    assert last["name"] == "broken"
    assert "not valid JSON" in last["problem"]


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["show", "--limit", "0"],
        ["show", "--instance", "p6-b200.48xlarge"],
        ["show", "paper-aws-2023"],
        ["check", "paper-virtual"],
    ],
)
def test_tables_fit_the_terminal(deepvm, monkeypatch, columns, words):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = deepvm(*words).out
    lines = [line for line in shown.splitlines() if str(library.directory()) not in line]
    assert max(map(len, lines)) <= columns
    if columns >= 60 and words[0] == "show":
        assert "…" not in shown


def test_prices_come_with_their_day_and_a_hint_when_old(deepvm, monkeypatch):
    monkeypatch.setattr(commands, "_today", lambda: library.load().prices_seen[1].replace(day=25))
    shown = deepvm("show").out
    assert "seen 2026-08-22" in shown
    assert "$0.5260" in shown
    assert "catalog update" not in shown
    monkeypatch.setattr(commands, "_today", lambda: library.load().prices_seen[1].replace(month=10))
    assert "deepvm catalog update --source skypilot" in deepvm("show").out


def test_show_tells_what_it_leaves_out(deepvm):
    assert "and 38 more" in deepvm("show", "--limit", "3").out
    assert "more" not in deepvm("show", "--limit", "0").out


def test_one_instance_comes_with_its_offers(deepvm, as_json):
    shown = deepvm("show", "--instance", "g5.xlarge").out
    assert "0.5302 to 0.9671" in shown
    document = as_json("show", "aws-2026-08", "--instance", "g5.xlarge")
    assert [i["name"] for i in document["instances"]] == ["g5.xlarge"]
    assert {o["market"]: o["usd_per_hour"] for o in document["offers"]} == {"on-demand": 1.006, "spot": 0.638}
    assert document["instances"][0]["sustained_gbps"] == 2.5
    assert document["instances"][0]["spot"]["seen"] == "2026-08-22"


def test_a_gpu_is_found_by_any_of_its_names(as_json):
    names = {i["name"] for i in as_json("show", "--gpu", "nvidia a10g")["instances"]}
    assert names == {"g5.xlarge", "g5.2xlarge", "g5.12xlarge", "g5.48xlarge"}


def test_quotas_and_notes_are_shown(deepvm):
    shown = deepvm("show", "paper-aws-2023").out
    assert "quota G spot: 128 vCPUs" in shown
    assert "note: A catalogue of the past" in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["show", "aws-2026-80"], "did you mean aws-2026-08"),
        (["show", "--instance", "g4dn.xlarg"], "did you mean g4dn.xlarge"),
        (["show", "--gpu", "A10"], "did you mean A10G"),
        (["show", "absent.json"], "cannot be read"),
        (["check", "nothing"], "no catalogue is called"),
        (["import", "absent.csv", "--name", "x"], "cannot be read"),
        (["update", "--source", "azure", "--name", "x"], "no source of catalogues is called"),
        (["update", "--source", "aws", "--name", "x"], "--region"),
        (["update", "--source", "skypilot", "--name", "x", "--url", "file:///x"], "not a web address"),
        (["update", "--name", "x"], "--source"),
        (["show", "--limit", "-1"], "limit"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_two(deepvm, words, told):
    result = deepvm(*words, code=2)
    assert told in result.err.replace("\n", " ")
    assert "Traceback" not in result.err
    assert result.out == ""


def test_an_import_accounts_for_its_rows(deepvm, as_json, vms):
    shown = deepvm("import", vms, "--name", "sky", "--provider", "aws").out
    assert "2 of 3 rows were kept" in shown
    assert "spot at or above on-demand" in shown
    assert "priced without its host" in shown
    document = as_json("import", vms, "--name", "sky", "--seen", "2026-08-01")
    assert document["report"]["kept"] == 2
    assert document["report"]["left_out"][0]["first_line"] == 4
    assert document["catalog"]["prices_seen"] == {"oldest": "2026-08-01", "newest": "2026-08-01"}
    assert document["changes"]["moves"] == []
    assert as_json("list")["catalogs"][-1]["name"] == "sky"


def test_a_second_import_tells_what_changed(deepvm, vms):
    deepvm("import", vms, "--name", "sky")
    vms.write_text(vms.read_text().replace("0.07", "0.14"))
    shown = deepvm("import", vms, "--name", "sky").out
    assert "1 prices changed" in shown
    assert "$0.0700 -> $0.1400 (+100%)" in shown


def test_of_many_prices_that_changed_eight_are_shown_and_all_are_counted(deepvm, vms):
    rows = [f"c5.{n}xlarge,,,4,8,,0.17,0.07,us-east-1,a" for n in range(1, 12)]
    vms.write_text("\n".join((HEADER, *rows)))
    deepvm("import", vms, "--name", "sky")
    vms.write_text(vms.read_text().replace("0.07", "0.14"))
    shown = deepvm("import", vms, "--name", "sky").out
    assert "11 prices changed" in shown
    assert shown.count("$0.0700 -> $0.1400") == 8


def test_names_with_markup_are_shown_as_they_are(deepvm, tmp_path):
    path = tmp_path / "odd.csv"
    path.write_text(f"{HEADER}\nc5.[red]large[/],,,4,8,,0.17,0.07,us-[bold]east,a\n")
    deepvm("import", path, "--name", "odd")
    assert "c5.[red]large[/]" in deepvm("show", "odd").out


def test_check_leaves_with_one_where_a_plan_would_be_wrong(deepvm, as_json):
    catalog = library.load("paper-virtual")
    prices = {m: dataclasses.replace(p, usd_low=np.full(len(p), 99.0)) for m, p in catalog.prices.items()}
    path = library.save(dataclasses.replace(catalog, name="wrong", prices=prices))
    assert "error: on-demand: price outside its own range (18): A, B, C and 15 more" in " ".join(
        deepvm("check", "wrong", code=1).out.split()
    )
    document = as_json("check", path, code=1)
    assert document["findings"][0]["severity"] == "error"
    assert as_json("check", "aws-2026-08")["name"] == "aws-2026-08"


def test_a_failed_update_is_reported_in_one_sentence(deepvm, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in [n for n in os.environ if n.startswith("AWS_") and n != "AWS_EC2_METADATA_DISABLED"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    result = deepvm("update", "--source", "aws", "--region", "us-east-1", "--name", "live", code=1)
    assert "no AWS credentials were found" in result.err
    assert result.out == ""

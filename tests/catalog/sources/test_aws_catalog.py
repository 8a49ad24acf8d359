"""Live AWS data: types and spot prices from a moto server, prices and quotas from botocore's stubber."""

import json
import logging
import sys
from datetime import datetime, timezone

import pytest

from deepvm.catalog import Market, library
from deepvm.catalog.check import Severity, check
from deepvm.catalog.sources import aws
from deepvm.catalog.sources.aws_names import QUOTAS
from deepvm.catalog.update import update
from deepvm.errors import MissingExtra, SourceFailed, UsageError

boto3 = pytest.importorskip("boto3")
from botocore.exceptions import (  # noqa: E402
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    NoRegionError,
    ProfileNotFound,
)
from botocore.stub import ANY, Stubber  # noqa: E402

SECRET = "wJalrXUtnFEMI-a-secret"
NOW = datetime(2026, 8, 22, 10, tzinfo=timezone.utc)


@pytest.fixture(autouse=True)
def account(tmp_path, monkeypatch):
    """Credentials of nobody, and none of this machine's own."""
    monkeypatch.setenv("DEEPVM_HOME", str(tmp_path))
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7NOBODY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.fixture(scope="module")
def moto_url():
    server_module = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="module")
def updated(moto_url, tmp_path_factory):
    """One reading of a whole region for all tests, for it takes seconds; what was told; and the home it is kept in."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPVM_HOME", str(home))
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7NOBODY")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        told = []
        result = update("aws", region="us-west-2", name="west", endpoint_url=moto_url, attempts=1, progress=told.append)
    return result, told, home


@pytest.fixture
def live(updated):
    result, told, _ = updated
    return result.catalog, told


def test_types_come_with_sizes_accelerators_and_both_bandwidths(live):
    catalog, told = live
    machine = catalog.instance("g4dn.xlarge")
    assert (machine.vcpus, machine.memory_gib, machine.family, machine.architecture) == (4, 16, "G", "x86_64")
    assert (machine.accelerator, machine.accelerator_count, machine.accelerator_memory_gib) == ("T4", 1, 16)
    assert (machine.sustained_gbps, machine.burst_gbps) == (5, 25)
    assert catalog.instance("c6g.large").architecture == "arm64"
    assert catalog.instance("c5.xlarge").accelerator is None
    assert catalog.instance("p4d.24xlarge").sustained_gbps == 400  # four cards of 100
    assert catalog.instance("p4de.24xlarge").accelerator == "A100-80GB"
    assert catalog.instance("g6f.large").accelerator_count == 0.125
    assert catalog.instance("trn1.2xlarge").accelerator == "Trainium"
    assert len(catalog.instances) > 1000
    assert any("describe instance types" in text for text in told)


def test_spot_prices_come_by_zone_with_their_own_day(live):
    catalog, _ = live
    spot = [o for o in catalog.offers("g4dn.xlarge") if o.market is Market.SPOT]
    assert {o.zone for o in spot} >= {"us-west-2a", "us-west-2b"}
    assert {(o.region, o.usd_per_hour, o.seen) for o in spot} == {
        ("us-west-2", 0.00001, datetime.now(timezone.utc).date())
    }


def test_what_cannot_be_read_is_missing_and_reported(live):
    catalog, _ = live
    assert len(catalog.prices[Market.ON_DEMAND]) == 0
    assert catalog.quotas == ()
    assert "On-demand prices could not be read and are missing" in catalog.notes[0]
    assert "Quotas could not be read and are unknown" in catalog.notes[1]
    assert not [f for f in check(catalog, datetime.now(timezone.utc).date()) if f.severity is Severity.ERROR]


def test_an_update_from_a_live_server_is_kept(updated, monkeypatch):
    result, _, home = updated
    monkeypatch.setenv("DEEPVM_HOME", str(home))
    assert result.fresh
    assert library.load("west").regions == ["us-west-2"]
    assert not update("aws", region="us-west-2", name="west", endpoint_url="http://127.0.0.1:1").fresh


# Scripted answers -------------------------------------------------------------------------------------------------


def described(name, *, gpu=None, cards=((5.0, 25.0),)):
    row = {
        "InstanceType": name,
        "VCpuInfo": {"DefaultVCpus": 4},
        "MemoryInfo": {"SizeInMiB": 16384},
        "ProcessorInfo": {"SupportedArchitectures": ["i386", "x86_64"]},
        "NetworkInfo": {
            "NetworkCards": [{"BaselineBandwidthInGbps": low, "PeakBandwidthInGbps": high} for low, high in cards]
        },
    }
    if gpu:
        row["GpuInfo"] = {"Gpus": [{"Name": gpu, "Count": 1, "MemoryInfo": {"SizeInMiB": 16384}}]}
    return row


def spot(name, zone, usd, hour=0, product="Linux/UNIX"):
    return {
        "InstanceType": name,
        "AvailabilityZone": zone,
        "SpotPrice": usd,
        "ProductDescription": product,
        "Timestamp": NOW.replace(hour=hour),
    }


def listed(name, usd, operation="RunInstances", unit="Hrs"):
    dimension = {"unit": unit, "pricePerUnit": {"USD": usd}}
    return json.dumps(
        {
            "product": {"attributes": {"instanceType": name, "operation": operation}},
            "terms": {"OnDemand": {"sku.term": {"priceDimensions": {"sku.term.rate": dimension}}}},
        }
    )


TYPES = [described("g4dn.xlarge", gpu="T4"), described("c5.xlarge"), described("z9.unpriced")]
SPOTS = [
    spot("g4dn.xlarge", "us-east-1a", "0.15", hour=3),
    spot("g4dn.xlarge", "us-east-1a", "0.16", hour=9),
    spot("g4dn.xlarge", "us-east-1a", "0.14", hour=1),
    spot("g4dn.xlarge", "us-east-1b", "0.2"),
    spot("g4dn.xlarge", "us-east-1c", "0.9", product="Windows"),
    spot("g4dn.xlarge", "us-east-1d", "free"),
    spot("gone.xlarge", "us-east-1a", "0.2"),
]
PRICES = [
    listed("g4dn.xlarge", "0.7", operation="RunInstances:0002"),
    listed("g4dn.xlarge", "0.526"),
    listed("c5.xlarge", "0.17"),
    listed("m5.xlarge", "0.19"),
    listed("z9.unpriced", "0.0000000000"),
    "{}",
    "not JSON",
]
ALLOWED = [{"QuotaCode": "L-3819A6DF", "Value": 128.0}, {"QuotaCode": "L-DB2E81BA", "Value": 0.0}]


# One session for all: reading the SDK's description of EC2 takes a third of a second.
SDK = boto3.Session(aws_access_key_id="AKIAIOSFODNN7NOBODY", aws_secret_access_key=SECRET)


class Scripted:
    """A boto3 session whose clients answer from a script: an answer, or an error to raise."""

    def __init__(self, *, types=TYPES, spots=SPOTS, prices=PRICES, quotas=ALLOWED):
        self.script = {
            "ec2": [
                ("describe_instance_types", {"InstanceTypes": types}, types, {}),
                ("describe_spot_price_history", {"SpotPriceHistory": spots}, spots, None),
            ],
            "pricing": [("get_products", {"PriceList": prices}, prices, None)],
            "service-quotas": [
                ("list_service_quotas", {"Quotas": quotas}, quotas, {"ServiceCode": "ec2"}),
            ],
        }
        self.regions = {}
        self.clients = {}

    def client(self, service, *, region_name, config, endpoint_url):
        self.regions[service] = region_name
        if service in self.clients:
            return self.clients[service]
        client = SDK.client(service, region_name=region_name, config=config)
        stubber = Stubber(client)
        for operation, answer, part, request in self.script[service]:
            if isinstance(part, str):
                stubber.add_client_error(operation, part, f"User arn:aws:iam::123456789012:user/me used {SECRET}")
            elif isinstance(part, Exception):
                raise part
            else:
                stubber.add_response(operation, answer, self.expected(operation) if request is None else request)
        stubber.activate()
        self.clients[service] = client
        return client

    def expected(self, operation):
        if operation == "describe_spot_price_history":
            return {"ProductDescriptions": ["Linux/UNIX"], "StartTime": ANY, "EndTime": ANY}
        wanted = {
            "regionCode": "us-east-1",
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
        }
        filters = [{"Type": "TERM_MATCH", "Field": f, "Value": v} for f, v in wanted.items()]
        return {"ServiceCode": "AmazonEC2", "Filters": filters}


def fetch(session=None, **options):
    return aws.fetch("us-east-1", session=session or Scripted(), **options)


def test_prices_and_quotas_make_a_whole_catalogue():
    session = Scripted()
    catalog = fetch(session)
    today = datetime.now(timezone.utc).date()
    assert session.regions == {"ec2": "us-east-1", "pricing": "us-east-1", "service-quotas": "us-east-1"}
    assert [(o.instance.name, o.zone, o.market.value, o.usd_per_hour, o.seen) for o in catalog.offers()] == [
        ("c5.xlarge", None, "on-demand", 0.17, today),
        ("g4dn.xlarge", None, "on-demand", 0.526, today),
        ("g4dn.xlarge", "us-east-1a", "spot", 0.16, today),
        ("g4dn.xlarge", "us-east-1b", "spot", 0.2, today),
    ]
    assert "z9.unpriced" not in catalog.index_by_name
    assert {q.name: q.vcpus for q in catalog.quotas} == {
        "G/GR/VT spot in us-east-1": 128,
        "G/GR/VT on-demand in us-east-1": 0,
    }
    assert catalog.notes == ()
    assert (catalog.name, catalog.provider) == ("aws-us-east-1", "aws")


def test_progress_counts_the_rows_that_came_so_far():
    told = []
    fetch(progress=told.append)
    assert told == [
        "describe instance types: 3",
        "describe spot price history: 7",
        "get products: 7",
        "list service quotas: 2",
    ]


def test_the_price_list_is_asked_in_the_one_region_that_serves_it():
    session = Scripted(prices="AccessDeniedException")
    aws.fetch("eu-west-3", session=session)
    assert session.regions == {"ec2": "eu-west-3", "pricing": "us-east-1", "service-quotas": "eu-west-3"}


def test_denied_prices_and_quotas_leave_the_rest_and_a_note():
    catalog = fetch(Scripted(prices="AccessDeniedException", quotas="AccessDeniedException"))
    assert len(catalog.prices[Market.SPOT]) == 2
    assert len(catalog.prices[Market.ON_DEMAND]) == 0
    assert "are missing: AWS denied get products (AccessDenied)" in catalog.notes[0]
    assert "AWS denied list service quotas" in catalog.notes[1]
    assert SECRET not in str(catalog.notes)


def test_denied_prices_come_from_the_last_catalogue_with_their_day():
    previous = fetch()
    catalog = fetch(Scripted(prices=[]), previous=previous)
    assert [o.usd_per_hour for o in catalog.offers("c5.xlarge")] == [0.17]
    assert "those of the last catalogue (2 types)" in catalog.notes[0]
    elsewhere = aws.fetch("us-east-1", session=Scripted(prices=[]), previous=library.load("paper-virtual"))
    assert "c5.xlarge" in elsewhere.index_by_name  # its prices are of the same region


def test_memory_is_in_gib_to_three_places():
    row = described("c5.xlarge")
    row["MemoryInfo"] = {"SizeInMiB": 1234}
    assert fetch(Scripted(types=[row])).instance("c5.xlarge").memory_gib == 1.205


def test_unknown_bandwidth_stays_unknown():
    row = described("c5.xlarge", cards=())
    del row["VCpuInfo"], row["MemoryInfo"]
    catalog = fetch(Scripted(types=[row]))
    machine = catalog.instance("c5.xlarge")
    assert (machine.gbps, machine.vcpus, machine.memory_gib) == (None, None, None)


@pytest.mark.parametrize(
    ("types", "told"),
    [
        ("UnauthorizedOperation", "AWS denied describe instance types"),
        ("AuthFailure", "check the credentials"),
        ("ExpiredTokenException", "renew them"),
        ("InvalidClientTokenId", "did not accept the credentials"),
        ("RequestLimitExceeded", "try again in a minute"),
        ("ThrottlingException", "throttled"),
        ("InternalError", "InternalError"),
        (NoCredentialsError(), "no AWS credentials were found: run 'aws configure'"),
        (NoRegionError(), "--region"),
        (ProfileNotFound(profile="p"), "AWS_PROFILE"),
        (EndpointConnectionError(endpoint_url="https://x"), "check the network"),
        (ConnectTimeoutError(endpoint_url="https://x"), "check the network"),
        ([], "no type with a price"),
        ([{"VCpuInfo": {"DefaultVCpus": 4}}], "unknown format"),
    ],
)
def test_each_failure_is_one_sentence_that_says_what_to_do(types, told):
    with pytest.raises(SourceFailed) as caught:
        fetch(Scripted(types=types))
    message = str(caught.value)
    assert told in message
    assert "\n" not in message
    assert SECRET not in message
    assert "123456789012" not in message


def test_without_credentials_the_error_says_how_to_get_them(monkeypatch, moto_url):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(SourceFailed, match="no AWS credentials were found"):
        aws.fetch("us-east-1", endpoint_url=moto_url)


def test_without_a_network_the_error_comes_soon():
    with pytest.raises(SourceFailed, match="could not be reached in us-east-1: check the network"):
        aws.fetch("us-east-1", endpoint_url="http://127.0.0.1:1", connect_timeout_s=1, attempts=1)


def test_a_deadline_holds_over_all_requests():
    with pytest.raises(SourceFailed, match="too slow"):
        fetch(deadline_s=-1)


def test_without_boto3_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(MissingExtra, match=r"reading live AWS data .*pip install 'deepvm\[aws\]'"):
        aws.fetch("us-east-1")


def test_a_region_is_needed():
    with pytest.raises(UsageError, match="--region"):
        aws.fetch("")


def test_a_failed_update_keeps_the_last_catalogue():
    first = update("aws", region="us-east-1", name="mine", session=Scripted())
    before = first.path.read_bytes()
    for session in (Scripted(types="RequestLimitExceeded"), Scripted(types=[]), Scripted(spots="InternalError")):
        with pytest.raises(SourceFailed, match="'mine' stays as it was"):
            update("aws", region="us-east-1", name="mine", force=True, session=session)
    assert first.path.read_bytes() == before


def test_an_update_tells_which_prices_moved():
    update("aws", region="us-east-1", name="mine", session=Scripted())
    dearer = Scripted(spots=[spot("g4dn.xlarge", "us-east-1a", "0.32")])
    changes = update("aws", region="us-east-1", name="mine", force=True, session=dearer).changes
    assert [(m.instance, m.usd_before, m.usd_after) for m in changes.moves] == [("g4dn.xlarge", 0.16, 0.32)]


def test_no_family_has_two_quotas_in_a_market():
    pairs = [(family, market) for families, market in QUOTAS.values() for family in families]
    assert len(pairs) == len(set(pairs))
    assert all(code.startswith("L-") and len(code) == 10 for code in QUOTAS)

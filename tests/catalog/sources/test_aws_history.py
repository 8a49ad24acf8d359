"""Past spot prices from AWS: the answer's order, days, a price from before, and a moto server's own history."""

import logging
from datetime import date, datetime, timedelta, timezone

import pytest

from deepvm.catalog.sources.aws_history import end_of_days, fetch_history
from deepvm.errors import SourceFailed, UsageError
from deepvm.market.catalog_history import load_history, update_from_aws

boto3 = pytest.importorskip("boto3")
from botocore.stub import ANY, Stubber  # noqa: E402

NOW = datetime(2026, 8, 10, 12, tzinfo=timezone.utc)


def answer(when, usd, *, name="g4dn.xlarge", zone="us-east-1a", product="Linux/UNIX"):
    place = {"InstanceType": name, "AvailabilityZone": zone}
    return {**place, "ProductDescription": product, "SpotPrice": usd, "Timestamp": when}


@pytest.fixture
def session(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPVM_HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return boto3.Session(aws_access_key_id="AKIAIOSFODNN7NOBODY", aws_secret_access_key="x", region_name="us-east-1")


class Stubbed:
    """A session whose EC2 client answers with these pages."""

    def __init__(self, session, *pages):
        self.client_ = session.client("ec2")
        self.stub = Stubber(self.client_)
        for number, rows in enumerate(pages):
            token = {"NextToken": str(number + 1)} if number + 1 < len(pages) else {}
            wanted = {"ProductDescriptions": ["Linux/UNIX"], "StartTime": ANY, "EndTime": NOW}
            wanted |= {"NextToken": str(number)} if number else {}
            self.stub.add_response("describe_spot_price_history", {"SpotPriceHistory": rows, **token}, wanted)
        self.stub.activate()

    def client(self, *_, **__):
        return self.client_


def test_every_day_keeps_its_last_price_over_all_pages(session):
    first = [answer(NOW - timedelta(hours=1), "0.30"), answer(NOW - timedelta(hours=5), "0.20")]
    second = [answer(NOW - timedelta(days=2), "0.10"), answer(NOW - timedelta(days=9), "0.05", zone="us-east-1b")]
    rows = fetch_history("us-east-1", 3, now=NOW, session=Stubbed(session, first, second))
    assert rows == [
        ("g4dn.xlarge", "us-east-1a", date(2026, 8, 8), 0.1),
        ("g4dn.xlarge", "us-east-1a", date(2026, 8, 10), 0.3),
        ("g4dn.xlarge", "us-east-1b", date(2026, 8, 7), 0.05),  # in force when the window began
    ]


def test_other_products_and_prices_that_are_none_are_left_out():
    rows = [answer(NOW, "0.3", product="Windows"), answer(NOW, "free"), answer(NOW, "-1"), answer(NOW, None)]
    assert list(end_of_days(iter(rows), NOW)) == []
    with pytest.raises(SourceFailed, match="unknown format"):
        list(end_of_days(iter([{"SpotPrice": "1", "ProductDescription": "Linux/UNIX"}]), NOW))


@pytest.mark.parametrize("days", [0, -1, 91, 10**6])
def test_days_that_aws_does_not_keep_are_refused(days):
    with pytest.raises(UsageError, match="1 to 90 days"):
        fetch_history("us-east-1", days)


def test_prices_are_added_to_the_history_of_the_catalogue(session):
    for when, usd in ((NOW - timedelta(days=2), "0.1"), (NOW, "0.3")):
        update_from_aws("us-east-1", 3, name="east", now=NOW, session=Stubbed(session, [answer(when, usd)]))
    history = load_history("east")
    assert history.at("g4dn.xlarge", "us-east-1a", "spot", date(2026, 8, 9)).usd_per_h == 0.1
    assert history.at("g4dn.xlarge", "us-east-1a", "spot", date(2026, 8, 10)).usd_per_h == 0.3
    with pytest.raises(UsageError, match="no spot prices of the last 3 days"):
        update_from_aws("us-east-1", 3, name="east", now=NOW, session=Stubbed(session, []))


@pytest.mark.chaos  # the server lists every type in every zone: 5 s of computing
def test_a_server_that_speaks_the_protocol_is_read(session):
    server_module = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        rows = fetch_history("us-east-1", 2, session=session, endpoint_url=f"http://{host}:{port}", attempts=1)
    finally:
        server.stop()
    assert rows
    assert all(usd > 0 and zone.startswith("us-east-1") for _, zone, _, usd in rows)

"""Live data of one AWS region: boto3's answers in, a catalogue of types, prices and vCPU quotas out.

Types and spot prices are required. On-demand prices and quotas need further permissions; a catalogue without them has a
note.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timezone
from typing import Any

from deepvm.catalog.model import Catalog, Instance, Market, Place, Prices, Quota
from deepvm.catalog.report import Progress
from deepvm.catalog.sources.aws_answers import amount, instance_of, price_of
from deepvm.catalog.sources.aws_names import QUOTAS
from deepvm.errors import DeepvmError, MissingExtra, SourceFailed, UsageError

PRICING_REGION = "us-east-1"  # a few regions serve the price list of all
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
DEADLINE_S = 300.0  # for some forty pages, each well under a second unless throttled
ATTEMPTS = 5
# Some services append "Exception" to these codes; it is removed before the comparison.
_DENIED = ("AccessDenied", "UnauthorizedOperation", "AuthFailure", "OptInRequired", "RequestExpired")
_EXPIRED = ("InvalidClientTokenId", "UnrecognizedClient", "SignatureDoesNotMatch", "ExpiredToken")
_THROTTLED = ("Throttling", "RequestLimitExceeded", "TooManyRequests", "RequestThrottled")
OnDemandPrices = dict[str, tuple[float, date]]  # by instance type: USD an hour, day seen


def default_name(region: str) -> str:
    """Return the default name of the region's catalogue."""
    return f"aws-{region}"


def description(region: str) -> str:
    return f"AWS in {region}, read from its interfaces."


def fetch(
    region: str,
    *,
    name: str | None = None,
    session: Any = None,
    endpoint_url: str | None = None,
    previous: Catalog | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    read_timeout_s: float = READ_TIMEOUT_S,
    deadline_s: float = DEADLINE_S,
    attempts: int = ATTEMPTS,
    progress: Progress | None = None,
) -> Catalog:
    """Read the region. ``previous`` supplies on-demand prices if the price list cannot be read."""
    calls = open_calls(
        region,
        session=session,
        endpoint_url=endpoint_url,
        connect_timeout_s=connect_timeout_s,
        read_timeout_s=read_timeout_s,
        deadline_s=deadline_s,
        attempts=attempts,
        progress=progress,
    )
    today = datetime.now(timezone.utc).date()
    notes: list[str] = []
    instances = _instances(calls, region)
    spot = _spot_prices(calls, region)
    try:
        on_demand = _on_demand_prices(calls, region, today)
    except SourceFailed as error:
        on_demand = _previous_prices(previous, region)
        used = f"those of the last catalogue ({len(on_demand)} types)" if on_demand else "missing"
        notes.append(f"On-demand prices could not be read and are {used}: {error}")
    try:
        quotas = _quotas(calls, region)
        if not quotas:
            notes.append("AWS listed no vCPU quotas: they are unknown.")
    except SourceFailed as error:
        quotas = ()
        notes.append(f"Quotas could not be read and are unknown: {error}")
    return _catalog(name or default_name(region), region, instances, spot, on_demand, quotas, notes)


def open_calls(
    region: str,
    *,
    session: Any = None,
    endpoint_url: str | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    read_timeout_s: float = READ_TIMEOUT_S,
    deadline_s: float = DEADLINE_S,
    attempts: int = ATTEMPTS,
    progress: Progress | None = None,
) -> AwsCalls:
    """Prepare requests to a region. The deadline counts from now."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise MissingExtra("reading live AWS data", "aws") from None
    if not region:
        raise UsageError("no AWS region given: add --region, as in --region us-east-1")
    config = Config(
        connect_timeout=connect_timeout_s,
        read_timeout=read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": attempts},
        user_agent_extra="deepvm",
    )
    return AwsCalls(
        session=session, new_session=boto3.Session, config=config, endpoint_url=endpoint_url,
        ends=time.monotonic() + deadline_s, progress=progress or (lambda _: None),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AwsCalls:
    """Paged requests with one deadline for all, and errors as SourceFailed."""

    session: Any
    new_session: Callable[[], Any]
    config: Any
    endpoint_url: str | None
    ends: float
    progress: Progress

    def pages(self, service: str, region: str, operation: str, field: str, **request: Any) -> Iterator[Any]:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        what = operation.replace("_", " ")
        count = 0
        try:
            session = self.session or self.new_session()
            client = session.client(service, region_name=region, config=self.config, endpoint_url=self.endpoint_url)
            for page in client.get_paginator(operation).paginate(**request):
                rows = page.get(field, [])
                count += len(rows)
                self.progress(f"{what}: {count}")
                yield from rows
                if time.monotonic() > self.ends:
                    raise SourceFailed(f"AWS was too slow ({what}): try again, or use a faster network")
        except (BotoCoreError, ClientError, ResponseParserError) as error:
            raise SourceFailed(_sentence(error, what, region)) from None
        except (KeyError, ValueError, TypeError) as error:
            raise SourceFailed(f"AWS sent an unknown format ({what}, {type(error).__name__})") from None


def _sentence(error: Exception, what: str, region: str) -> str:
    """Describe an error by its code and type: the SDK's messages can contain accounts, tokens and addresses."""
    from botocore import exceptions as known

    if isinstance(error, known.ClientError):
        code = str(error.response.get("Error", {}).get("Code", "unknown"))[:64].removesuffix("Exception")
        if code in _DENIED:
            return f"AWS denied {what} ({code}): check the credentials and that they allow it"
        if code in _EXPIRED:
            return f"AWS did not accept the credentials ({code}): renew them, and check this machine's clock"
        if code in _THROTTLED:
            return f"AWS throttled {what} ({code}): try again in a minute"
        return f"AWS refused {what} ({code}): check the region and try again"
    if isinstance(error, known.NoCredentialsError | known.PartialCredentialsError | known.CredentialRetrievalError):
        return "no AWS credentials were found: run 'aws configure', or set AWS_PROFILE or AWS_ACCESS_KEY_ID"
    if isinstance(error, known.NoRegionError | known.InvalidRegionError):
        return "no valid AWS region given: add --region, as in --region us-east-1"
    if isinstance(error, known.ProfileNotFound):
        return "the AWS profile does not exist: check AWS_PROFILE"
    if isinstance(error, known.HTTPClientError | known.EndpointConnectionError | known.ConnectionError):
        return f"AWS could not be reached in {region}: check the network and the region's name"
    return f"the AWS request failed ({type(error).__name__}): check the AWS configuration"


def _instances(calls: AwsCalls, region: str) -> list[Instance]:
    rows = calls.pages("ec2", region, "describe_instance_types", "InstanceTypes")
    try:
        return [instance_of(row) for row in rows]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceFailed(f"AWS sent an instance type in an unknown format ({type(error).__name__})") from None


def _spot_prices(calls: AwsCalls, region: str) -> dict[tuple[str, str], tuple[float, date]]:
    newest: dict[tuple[str, str], tuple[datetime, float]] = {}
    now = datetime.now(timezone.utc)
    rows = calls.pages(
        "ec2", region, "describe_spot_price_history", "SpotPriceHistory",
        ProductDescriptions=["Linux/UNIX"], StartTime=now, EndTime=now,
    )  # fmt: skip
    for row in rows:
        key, when = (row["InstanceType"], row["AvailabilityZone"]), row["Timestamp"]
        usd = amount(row["SpotPrice"])
        if usd is None or not row.get("ProductDescription", "").startswith("Linux/UNIX"):
            continue  # accounts older than 2013 get "Linux/UNIX (Amazon VPC)"
        if key not in newest or when > newest[key][0]:
            newest[key] = when, usd
    # The timestamp is the start of a price; it is valid, and seen, today.
    return {key: (usd, now.date()) for key, (_, usd) in newest.items()}


def _on_demand_prices(calls: AwsCalls, region: str, today: date) -> OnDemandPrices:
    wanted = {
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    prices: OnDemandPrices = {}
    for text in calls.pages(
        "pricing", PRICING_REGION, "get_products", "PriceList", ServiceCode="AmazonEC2", Filters=filters
    ):
        found = price_of(text)
        if found is not None:
            prices.setdefault(found[0], (found[1], today))
    if not prices:
        raise SourceFailed("AWS's price list has no prices for this region")
    return prices


def _quotas(calls: AwsCalls, region: str) -> tuple[Quota, ...]:
    found = []
    for row in calls.pages("service-quotas", region, "list_service_quotas", "Quotas", ServiceCode="ec2"):
        known, value = QUOTAS.get(row.get("QuotaCode", "")), row.get("Value")
        if known is not None and isinstance(value, int | float) and math.isfinite(value) and value >= 0:
            found.append(Quota(families=known[0], market=known[1], vcpus=float(value), region=region))
    return tuple(sorted(found, key=lambda q: q.name))


def _previous_prices(previous: Catalog | None, region: str) -> OnDemandPrices:
    if previous is None:
        return {}
    return {
        offer.instance.name: (offer.usd_per_hour, offer.seen)
        for offer in previous.offers()
        if offer.market is Market.ON_DEMAND and (offer.region, offer.zone) == (region, None)
    }


def _catalog(
    name: str,
    region: str,
    instances: list[Instance],
    spot: Mapping[tuple[str, str], tuple[float, date]],
    on_demand: OnDemandPrices,
    quotas: tuple[Quota, ...],
    notes: list[str],
) -> Catalog:
    priced = {instance for instance, _ in spot} | on_demand.keys()
    kept = sorted({i.name: i for i in instances if i.name in priced}.values(), key=lambda i: i.name)
    if not kept:
        raise SourceFailed(f"AWS has no type with a price in {region}: check the region's name")
    index = {instance.name: i for i, instance in enumerate(kept)}
    zones = sorted({zone for _, zone in spot})
    places: tuple[Place, ...] = ((region, None), *((region, zone) for zone in zones))
    place = {zone: i for i, (_, zone) in enumerate(places)}
    try:
        return Catalog(
            name=name,
            provider="aws",
            description=description(region),
            instances=tuple(kept),
            places=places,
            prices={
                Market.ON_DEMAND: Prices.from_rows(
                    sorted((index[t], 0, usd, day.toordinal()) for t, (usd, day) in on_demand.items() if t in index)
                ),
                Market.SPOT: Prices.from_rows(
                    sorted((index[t], place[z], usd, d.toordinal()) for (t, z), (usd, d) in spot.items() if t in index)
                ),
            },
            quotas=quotas,
            notes=tuple(notes),
        )
    except DeepvmError as error:
        raise SourceFailed(f"AWS sent invalid data: {error}") from None

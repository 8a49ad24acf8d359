"""Calls to EC2: what a refusal says, and that all pages are read."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
from botocore import exceptions as known

from deepvm.errors import SourceFailed
from deepvm.runtime.backends.ec2.calls import Call, Calls


class Client:
    """Answers in turn; an exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), list[dict[str, Any]]()

    def describe_things(self, **parameters: Any) -> Any:
        self.asked.append(parameters)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def calls(*answers: Any, **options: Any) -> tuple[Calls, Client]:
    client = Client(*answers)
    return Calls(region="us-east-1", _clients={"ec2": client}, **options), client


def refusal(code: str, message: str = "of account 123") -> known.ClientError:
    return known.ClientError({"Error": {"Code": code, "Message": message}}, "DescribeThings")


@pytest.mark.parametrize(
    ("error", "says", "hides"),
    [
        (refusal("UnauthorizedOperation"), "denied", "account"),
        (refusal("ExpiredToken"), "credentials", "account"),
        (refusal("Throttling"), "throttled", "account"),
        (refusal("InvalidParameterValue", "no such size. "), r"InvalidParameterValue\): no such size$", "account"),
        (refusal("InvalidUserData.Malformed"), r"us-east-1 \(InvalidUserData.Malformed\)$", "account"),
        (refusal("Strange"), r"us-east-1 \(Strange\)$", "account"),
        (known.NoCredentialsError(), "aws configure", "-"),
        (known.ProfileNotFound(profile="x"), "AWS_PROFILE", "-"),
        (known.ParamValidationError(report="Unknown parameter"), "Unknown parameter", "-"),
        (known.EndpointConnectionError(endpoint_url="https://x"), "network", "https"),
        (known.DataNotFoundError(data_path="x"), "DataNotFoundError", "-"),
    ],
)
def test_a_refusal_says_what_to_do_and_hides_accounts(error: Exception, says: str, hides: str) -> None:
    asked, _ = calls(error)
    with pytest.raises(SourceFailed, match=says) as told:
        asked.read("ec2", "describe_things")
    assert hides not in str(told.value) or hides == "-"


def test_rows_of_all_pages_are_read() -> None:
    asked, client = calls({"Things": [1, 2], "NextToken": "b"}, {"NextToken": "c"}, {"Things": [3]})

    assert asked.rows("ec2", "describe_things", "Things", Owner="me") == [1, 2, 3]
    assert client.asked == [{"Owner": "me"}, {"Owner": "me", "NextToken": "b"}, {"Owner": "me", "NextToken": "c"}]


def test_a_dry_run_shows_changes_and_asks_nobody() -> None:
    shown: list[str] = []
    asked, client = calls(dry_run=True, show=shown.append)

    assert asked.change("ec2", "describe_things", {"Secret": 1}, shown={"Secret": "..."}, dry_answer={"Id": "i-1"}) == {
        "Id": "i-1"
    }
    assert asked.change("ec2", "describe_things", {}) == {}
    assert client.asked == []
    assert len(shown) == len(asked.made) == 2
    assert "..." in shown[0]
    with pytest.raises(RuntimeError, match="dry run"):
        asked.read("ec2", "describe_things")


def test_a_call_is_shown_as_people_write_it() -> None:
    call = Call(service="ec2", operation="create_tags", parameters={"Tags": ["é – 20 µs"], "Since": date(2026, 9, 1)})
    assert call.to_line() == (
        '{"service": "ec2", "operation": "create_tags", "parameters": {"Tags": ["é – 20 µs"], "Since": "2026-09-01"}}'
    )

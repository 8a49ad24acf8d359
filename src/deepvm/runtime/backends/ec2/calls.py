"""Requests -> calls to AWS through boto3, with deadlines, plain errors, and a list of those that change something."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepvm.errors import MissingExtra, SourceFailed

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0  # an instant fleet answers when its machines are allocated
ATTEMPTS = 5
CREDENTIALS = frozenset(
    {
        "AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch", "ExpiredToken",
        "RequestExpired", "OptInRequired", "PendingVerification",
    }
)  # fmt: skip
DENIED = frozenset({"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"})
THROTTLED = frozenset({"RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled"})


class Ec2Refused(SourceFailed):
    """EC2 refused a request; ``code`` is its error code."""

    def __init__(self, message: str, code: str) -> None:
        self.code = code
        super().__init__(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call that changes something, for display: secrets are ``***``, user data are plain text."""

    service: str
    operation: str
    parameters: Mapping[str, Any]

    def to_line(self) -> str:
        shown = {"service": self.service, "operation": self.operation, "parameters": self.parameters}
        return json.dumps(shown, default=str, ensure_ascii=False)


@dataclass(kw_only=True)
class Calls:
    region: str
    endpoint_url: str | None = None
    dry_run: bool = False
    show: Callable[[str], None] | None = None  # receives every call that changes something
    made: list[Call] = field(default_factory=list)  # in a dry run: those that would have been made
    _clients: dict[str, Any] = field(default_factory=dict)

    def read(self, service: str, operation: str, **parameters: Any) -> Any:
        if self.dry_run:
            raise RuntimeError(f"a dry run must not call {operation}")
        return self._call(service, operation, parameters)

    def rows(self, service: str, operation: str, key: str, **parameters: Any) -> list[Any]:
        """Return the rows of all pages."""
        page = self.read(service, operation, **parameters)
        found = list(page.get(key, []))
        while page.get("NextToken"):
            page = self.read(service, operation, **parameters, NextToken=page["NextToken"])
            found += page.get(key, [])
        return found

    def change(
        self,
        service: str,
        operation: str,
        parameters: Mapping[str, Any],
        *,
        shown: Mapping[str, Any] | None = None,
        dry_answer: Mapping[str, Any] | None = None,
    ) -> Any:
        call = Call(service=service, operation=operation, parameters=parameters if shown is None else shown)
        self.made.append(call)
        if self.show is not None:
            self.show(call.to_line())
        return dry_answer or {} if self.dry_run else self._call(service, operation, parameters)

    def _call(self, service: str, operation: str, parameters: Mapping[str, Any]) -> Any:
        client = self._client(service)
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        try:
            return getattr(client, operation)(**parameters)
        except ClientError as error:
            raise _refused(error.response.get("Error", {}), operation.replace("_", " "), self.region) from None
        except (BotoCoreError, ResponseParserError) as error:
            raise SourceFailed(_failure(error, self.region)) from None

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            try:
                import boto3
                from botocore.config import Config
                from botocore.exceptions import BotoCoreError
            except ImportError:
                raise MissingExtra("a run on EC2", "aws") from None
            config = Config(
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=READ_TIMEOUT_S,
                retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
                user_agent_extra="deepvm",
            )
            try:
                self._clients[service] = boto3.Session().client(
                    service, region_name=self.region, endpoint_url=self.endpoint_url, config=config
                )
            except (BotoCoreError, ValueError) as error:
                raise SourceFailed(_failure(error, self.region)) from None
        return self._clients[service]


def _refused(error: Mapping[str, Any], what: str, region: str) -> Ec2Refused:
    """Return the error for a refusal. AWS's message is included only if it is about a parameter: others may contain
    accounts and keys."""
    code = str(error.get("Code", "unknown"))[:64]
    if code in DENIED:
        return Ec2Refused(f"AWS denied to {what} ({code}): allow it in the credentials' policy", code)
    if code in CREDENTIALS:
        return Ec2Refused(f"AWS did not accept the credentials ({code}): renew them, and check the clock", code)
    if code in THROTTLED:
        return Ec2Refused(f"AWS throttled {what} ({code}): try again in a minute", code)
    harmless = code.startswith(("Invalid", "Missing", "Malformed")) and "UserData" not in code
    message = f": {str(error.get('Message', ''))[:200].rstrip('. ')}" if harmless else ""
    return Ec2Refused(f"AWS refused to {what} in {region} ({code}){message}", code)


def _failure(error: Exception, region: str) -> str:
    from botocore import exceptions as known

    if isinstance(error, known.NoCredentialsError | known.PartialCredentialsError | known.CredentialRetrievalError):
        return "no AWS credentials were found: run 'aws configure', or set AWS_PROFILE or AWS_ACCESS_KEY_ID"
    if isinstance(error, known.ProfileNotFound):
        return "the AWS profile does not exist: check AWS_PROFILE"
    if isinstance(error, known.ParamValidationError):
        return f"boto3 refused a request: {str(error)[:200]}; is it older than 1.34?"
    if isinstance(error, known.HTTPClientError | known.ConnectionError):
        return f"AWS could not be reached in {region}: check the network and the region's name"
    return f"AWS could not be called ({type(error).__name__}): check the AWS configuration"

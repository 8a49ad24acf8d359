"""EC2: a spot instance's interruption notice, and the rebalance recommendation that may precede it."""

from __future__ import annotations

import time

from deepvm.runtime.notices.base import Action, Notice
from deepvm.runtime.notices.metadata import Answer, Metadata, fields_of, iso_time_s

TOKEN_PATH = "/latest/api/token"  # noqa: S105
ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
INTERRUPTIONS: tuple[Action, ...] = ("terminate", "stop", "hibernate")
TOKEN_S = 21_600  # the longest that EC2 gives


class AwsNotices:
    """Instance metadata, version 2: every request carries a token, which is renewed in time."""

    interval_s = 5.0  # what EC2's manual recommends; the notice comes 120 s before

    def __init__(self, url: str | None = None, *, token_s: int = TOKEN_S) -> None:
        self._metadata = Metadata(url)
        self._token_s = token_s
        self._token: str | None = None
        self._renew_at = 0.0  # on the monotonic clock

    def present(self) -> bool:
        return self._fresh_token() is not None

    def poll(self) -> Notice | None:
        answer = self._get(ACTION_PATH)
        if answer is None:  # no service answers: the second request would wait as long
            return None
        if answer.found and (notice := _interruption(answer.text)) is not None:
            return notice
        answer = self._get(REBALANCE_PATH)
        if answer is not None and answer.found and iso_time_s(fields_of(answer.text).get("noticeTime")) is not None:
            return Notice(action="rebalance", at_s=None, source="aws")  # its time is that of the notice, not of an end
        return None

    def _get(self, path: str) -> Answer | None:
        token = self._token if time.monotonic() < self._renew_at else None
        answer = None if token is None else self._ask(path, token)
        if token is not None and (answer is None or answer.status != 401):
            return answer
        token = self._fresh_token()  # it was missing, old or refused: a resumed machine's clock stood still
        return None if token is None else self._ask(path, token)

    def _ask(self, path: str, token: str) -> Answer | None:
        return self._metadata.ask(path, {"X-aws-ec2-metadata-token": token})

    def _fresh_token(self) -> str | None:
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._token_s)}
        asked_at = time.monotonic()
        answer = self._metadata.ask(TOKEN_PATH, ttl, method="PUT")
        self._token = answer.text.strip() or None if answer is not None and answer.found else None
        self._renew_at = asked_at + 0.9 * self._token_s
        return self._token


def _interruption(text: str) -> Notice | None:
    fields = fields_of(text)
    for action in INTERRUPTIONS:
        if action == fields.get("action"):
            return Notice(action=action, at_s=iso_time_s(fields.get("time")), source="aws")
    return None

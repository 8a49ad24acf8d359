"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.support")
pytest_plugins = ["tests.support.nodes", "tests.support.small_disk"]

settings.register_profile("deepvm", suppress_health_check=[HealthCheck.too_slow])  # machines are shared and noisy
settings.load_profile("deepvm")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads of several processes would spin for the same cores
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as shells start jobs in the background; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("COLUMNS", None)  # a process that runs tests beside others has 80, and rich would keep to it for good


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with whole runs, which mostly wait: no core is left with one of them at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/runtime/"))


@pytest.fixture(autouse=True, scope="module")
def _what_earlier_modules_left_is_not_walked_again() -> None:
    """Imports (torch, moto, boto3) and their tables stay to the end; each full collection, and each look at all
    objects of the process, would go through half a million of them."""
    gc.collect()
    gc.freeze()

"""Fixtures every test may use."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import lent_fds
import pytest
from hypothesis import HealthCheck, settings

# No property is decided by the clock: a busy machine takes longer, and that says nothing about the code. The same code
# meets the same examples, so that nobody's change fails by what another walk would have found; `make test EXPLORE=1`
# is for new walks.
settings.register_profile(
    "valve", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
)
settings.register_profile("explore", settings.get_profile("valve"), derandomize=False, print_blob=True)
settings.load_profile("valve")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout: tests read headers and sources from it, never import from it."""
    return Path(__file__).resolve().parents[1]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is there before the first test stays: a collection of garbage between two tests need not walk it."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def hanging_up_ends_who_does_not_handle_it() -> Iterator[None]:
    """Also in a run under `nohup`, which ignores SIGHUP: whatever a test starts would inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def nothing_of_a_test_acts_in_another() -> Iterator[None]:
    """What fakes had of the last test goes before the next one begins: its pytest item let go of it only now."""
    lent_fds.collect()
    yield
    assert gc.isenabled(), "a test left the garbage collector off: descriptors pile up in those that follow"

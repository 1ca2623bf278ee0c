"""Fixtures every test may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lent_fds
import pytest


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout: tests read headers and sources from it, never import from it."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def no_lent_descriptor_outlives_its_test() -> Iterator[None]:
    """Fakes hand out descriptors by the thousand in a whole run; a machine may allow 1,024."""
    yield
    lent_fds.collect()

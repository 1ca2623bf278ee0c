"""Fixtures every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout: tests read headers and sources from it, never import from it."""
    return Path(__file__).resolve().parents[1]

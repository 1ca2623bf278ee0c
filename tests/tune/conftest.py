"""Tests of valve-tune run in its own environment (make test-tune); without it they are left out."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # waiting threads spin: beside other work ten times the CPU
missing = [name for name in ("torch", "transformers", "valve_tune") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if missing else []
HUNG_S = 1800  # torch alone takes half a minute to import on a busy machine, and a test starts up to a dozen processes
sys.path.insert(0, str(Path(__file__).parent))  # oracle.py and jobs.py beside the tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(HUNG_S))

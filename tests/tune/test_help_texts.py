"""Every option and command of `valve tune` and of the programs beside it has a sentence of help."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from help_texts import missing, parser_of

MEASUREMENTS = Path(__file__).parents[2] / "tools" / "tune"
MODULES = ["bench", "fused", "predict", "valve_tune.serve.cli", "valve_tune.serve.worker"]


@pytest.mark.parametrize("module", MODULES)
def test_no_option_and_no_command_is_without_its_sentence(module, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module])
    monkeypatch.syspath_prepend(MEASUREMENTS)

    assert missing(parser_of(importlib.import_module(module).main)) == []

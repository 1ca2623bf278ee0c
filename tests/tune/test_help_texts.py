"""Every option and command of `valve tune` and of the programs beside it has a sentence of help."""

from __future__ import annotations

import importlib
import sys

import pytest
from help_texts import missing, parser_of

MODULES = ["bench", "engine.fused", "engine.predict", "serve.cli", "serve.worker"]


@pytest.mark.parametrize("module", MODULES)
def test_no_option_and_no_command_is_without_its_sentence(module, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module])

    assert missing(parser_of(importlib.import_module(f"valve_tune.{module}").main)) == []

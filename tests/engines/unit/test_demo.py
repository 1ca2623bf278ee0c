"""`make demo-vllm` without its engines: the settings are ones that valved takes, and its arithmetic."""

from __future__ import annotations

import pytest
from valve_tools.engines.demo import CONFIG, POOL_MIB, Look, share

from valved.config import load_config


def looks(*states):
    """One a second: (a request is open, tokens)."""
    return [
        Look(at_s=float(at), is_open=is_open, tokens=tokens, ran_s=at / 2)
        for at, (is_open, tokens) in enumerate(states)
    ]


def test_valved_takes_the_demos_settings(tmp_path):
    path = tmp_path / "valve.toml"
    path.write_text(CONFIG.format(pool_mib=POOL_MIB))

    assert load_config(path, {}).memory.pool_mib == POOL_MIB


def test_the_batchs_share_begins_and_ends_with_the_benchmarks_requests():
    seen = share(looks((False, 0), (False, 90), (True, 100), (False, 100), (False, 140), (True, 180), (False, 900)))

    assert (seen.seconds, seen.idle_s, seen.tokens) == (3.0, 2.0, 80)
    assert seen.ran_s == pytest.approx(1.5)


def test_without_any_request_there_is_no_share():
    assert share(looks((False, 0), (False, 50))).seconds == 0.0

"""Settings: a wrong one stops the start, with its name and the next step."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from valved.cli import policy
from valved.config import Config, effective, load_config
from valved.errors import ConfigError
from valved.model.ids import Mode

ROOT = Path(__file__).resolve().parents[2]


def load(tmp_path, text="", **flags):
    path = tmp_path / "valve.toml"
    path.write_text(text)
    return load_config(path, flags)


def test_an_empty_file_means_the_defaults(tmp_path):
    assert load(tmp_path) == Config()


def test_the_file_is_read_and_flags_win(tmp_path):
    config = load(tmp_path, 'mode = "observe"\nlease_ms = 500\n[cooldown]\nfloor_ms = 2.5\n', mode="off")

    assert (config.mode, config.lease_ns, config.cooldown_settings().floor_ns) == (Mode.OFF, 500_000_000, 2_500_000)


def test_flags_that_were_not_given_change_nothing(tmp_path):
    assert load(tmp_path, 'mode = "observe"', mode=None, metrics_port=None).mode is Mode.OBSERVE


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("unknown key", "colour = 1", "colour"),
        ("unknown key in a table", "[cooldown]\nfloor = 5", "floor"),
        ("wrong type", 'lease_ms = "long"', "lease_ms"),
        ("unknown mode", 'mode = "turbo"', "turbo"),
        ("floor above start", "[cooldown]\nfloor_ms = 50", "cooldown.floor_ms = 50"),
        ("factor of one", "[cooldown]\nfactor = 1.0", "factor"),
        ("no lease", "lease_ms = 0", "lease_ms"),
        ("a port that is none", "metrics_port = 70000", "metrics_port"),
        ("real time beyond the kernel's", "fifo_priority = 99", "fifo_priority"),
        ("a loop that comes before the gate", "fifo_priority = 5\nloop_priority = 5", "loop_priority = 5"),
        ("a loop in real time alone", "loop_priority = 1", "loop_priority = 1"),
        ("a loop before threads that spin", "fifo_priority = 2\nloop_priority = 1\nspin_us = 5", "loop_priority = 1"),
        ("unknown log level", 'log_level = "loud"', "loud"),
        ("a breaker without a budget", "[breaker]\nbudget_share = 0.0", "budget_share"),
        ("ticks that take the whole loop", "[memory]\ntick_ms = 0.001", "memory.tick_ms"),
        ("reports that take the API server", "[kube]\nreport_s = 0.001", "kube.report_s"),
        ("a page for every address", 'metrics_host = ""', "metrics_host"),
        ("not TOML", "mode = ", "TOML"),
    ],
)
def test_what_makes_no_sense_stops_the_start_and_is_named(tmp_path, name, text, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(tmp_path, text)


NONSENSE = ("inf", "-inf", "nan", "-1", "1e30", "1000000000000000000000")


@pytest.mark.parametrize("value", NONSENSE)
@pytest.mark.parametrize("name", [name for name, value in effective(Config()).items() if type(value) in (int, float)])
def test_no_number_without_sense_ever_passes_and_its_key_is_always_named(tmp_path, name, value):
    table, _, key = name.rpartition(".")
    text = f"[{table}]\n{key} = {value}\n" if table else f"{key} = {value}\n"

    with pytest.raises(ConfigError, match=re.escape(name)) as caught:
        load(tmp_path, text)

    assert caught.value.next_step or name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[memory]\ntau_s = 5", "memory.tau_min_s"),
        ("[memory]\nheadroom_min_mib = 17000", "memory.headroom_min_mib"),
        ("[cooldown]\nceiling_ms = 10", "cooldown.start_ms"),
        ("hang_ms = 1e-9", "hang_ms"),
    ],
)
def test_settings_that_contradict_each_other_are_named_by_their_keys(tmp_path, text, key):
    with pytest.raises(ConfigError, match=re.escape(key)):
        load(tmp_path, text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.toml"):
        load_config(tmp_path / "nowhere.toml", {})


def test_the_manual_lists_every_setting_with_its_default():
    manual = (ROOT / "docs" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \|", manual, re.MULTILINE))
    stated = {name: "" if value == '""' else value.strip('"') for name, value in rows.items()}

    expected = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in effective(Config()).items()
    }
    assert stated == expected


@pytest.mark.parametrize("key", ["run_dir", "trace_file", "metrics_host", "group", "view_group", "log_level"])
@pytest.mark.parametrize("text", ["\\u0000", "a\\u001b[2Jb", "a\\nb"])
def test_words_that_no_path_or_name_can_hold_are_never_a_traceback_of_the_start(tmp_path, key, text):
    path = tmp_path / "valve.toml"
    path.write_text(f'{key} = "{text}"\n')

    with pytest.raises(ConfigError, match=f"^{key} = .*must be printable text"):
        load_config(path, {})


def test_a_setting_never_has_one_name_in_the_configuration_and_another_at_the_terminal():
    in_the_file = {name: value for name, value in effective(Config()).items() if name.startswith("cooldown.")}

    assert in_the_file.pop("cooldown.arrivals") is False  # not to be set while valved runs
    assert set(policy.SETTINGS) == set(in_the_file)
    fields = policy.changes([f"{name}={value}" for name, value in in_the_file.items()])
    assert fields["cooldown_window_ns"] == 600_000_000_000
    assert policy.changes(["cooldown.window_ms=600000"]) == {"cooldown_window_ns": 600_000_000_000}  # as in 0.1


def test_a_file_of_brackets_alone_is_never_a_traceback(tmp_path):
    with pytest.raises(ConfigError, match="is not TOML"):
        load(tmp_path, "a = " + "[" * 100_000)


def test_a_file_without_end_is_never_read_to_its_end(tmp_path):
    with pytest.raises(ConfigError, match="is not TOML: it has more than"):
        load(tmp_path, "a" * (2 << 20))


def test_a_pipe_that_nobody_writes_into_never_stops_the_start(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"cannot read .*: this is no file"):
            load_config(path, {})


@pytest.mark.parametrize("name", sorted(effective(Config())))
def test_a_value_of_any_length_never_fills_the_terminal_and_its_setting_is_named(tmp_path, name):
    table, _, key = name.rpartition(".")
    text = f"[{table}]\n" * bool(table) + f'{key} = "{"x" * 100_000}"'
    said = f"{key} may be any name or path"
    try:
        load(tmp_path, text)
    except ConfigError as error:
        said = str(error)

    assert key in said
    assert len(said) < 500

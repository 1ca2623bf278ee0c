"""What the manual tells a reader to type exists: commands, options, targets of make, modules, settings and metrics."""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess

import kubernetes_validate
import msgspec
import pytest
import yaml
from manual_commands import ROOT, Shown, commands, fault, parser_for, shown
from valve_scheduler.webhook.admission import AdmissionSettings, mutate_offline

from valved.config import Config, effective, load_config

LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True)
HISTORY = ("CHANGELOG.md", "DECISIONS.md")  # they tell of what was
PAGES = [page for page in LISTED.stdout.split() if page not in HISTORY]
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
MANUAL = [page for page in PAGES if page.count("/") < 2 and not page.startswith("tests/")]
SETTINGS = {*effective(Config())}
OTHERS = ("docs/finetuning.md", "docs/granted.md")  # name fields of the trainer, of the router and of a probe alike
OF_THE_DAEMON = [page for page in MANUAL if (page.startswith("docs/") or "/" not in page) and page not in OTHERS]
TABLES = [name for name, table in msgspec.structs.asdict(Config()).items() if isinstance(table, msgspec.Struct)]


@pytest.mark.parametrize("page", PAGES)
def test_no_page_shows_a_command_or_an_option_that_does_not_exist(page):
    assert [f"{one}\n  {why}" for one in shown(page, TEXTS[page]) if (why := fault(one))] == []


def test_no_page_of_the_manual_is_skipped_by_this_check():
    """Blocks, indented text and sentences: a page that lost all of its commands would pass in silence."""
    found = [one for page in MANUAL for one in shown(page, TEXTS[page])]
    typed = {" ".join(one.words[:2]) for one in found}

    assert len(found) > 300
    assert sum(one.is_whole for one in found) > 200
    assert {"valve status", "valve run", "valve cluster", "valve tune", "valve replay", "make demo"} <= typed
    assert {"README.md", "docs/own-program.md", "docs/cluster.md", "docs/finetuning.md"} <= {one.page for one in found}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("valve status --nosuch", "--nosuch"),
        ("sudo valve up --mode sometimes", "invalid choice"),
        ("cd there && valve nosuch", "invalid choice"),
        ("VALVE_RUN_DIR=/x valve cluster nosuch | head", "invalid choice"),
        ("valve cluster pause [--nosuch]", "no option --nosuch"),
        ("valve route serv|top", "no command serv"),
        ("kubectl valve explain --nosuch pod", "--nosuch"),
        ("valve demo memory --rounds 3", "--rounds"),
        ("valve tune run --model m --nosuch 3", "--nosuch"),
        ("valve tune walk", "no command walk"),
        ("valve-scheduler nosuch", "invalid choice"),
        ("valved --nosuch", "--nosuch"),
        ("valve bench hotpath nosuch", "no benchmark nosuch"),
        ("make nosuch", "no nosuch"),
        ("make test-engines NOSUCH=1", "no NOSUCH"),
    ],
)
def test_a_wrong_command_never_passes_the_check(line, told):
    (one,) = commands("page", line)

    assert told in fault(one)


@pytest.mark.parametrize(
    "line",
    [
        "valve run --online --name chat -- vllm serve my-model --port 1",
        "valve policy [NAME=VALUE ...] [--json]",
        "valve tune run | ls | watch",
        "valve cluster measure NAME --limits 1,2 -- vllm bench --nosuch",
        "make test-engines MATRIX=1    # the older ones, too",
        "valve bench --list | head && true",
    ],
)
def test_a_right_command_is_never_a_fault(line):
    assert [fault(one) for one in commands("page", line)] == [""]


def test_a_command_is_found_wherever_a_page_shows_it():
    page = (
        "Run `sudo valve up` first.\n\n    cd there && make build   # once\n\n```sh\nvalve top \\\n  --looks 1\n```\n"
    )

    assert set(shown("page", page)) == {
        Shown("page", ("valve", "up"), True),
        Shown("page", ("make", "build"), True),
        Shown("page", ("valve", "top", "--looks", "1"), True),
    }


def below(*words):
    """The commands of a parser."""
    (found,) = [action for action in parser_for(words)[0]._actions if isinstance(action, argparse._SubParsersAction)]
    return [(*words, name) for name in found.choices]


@pytest.mark.parametrize("command", [*below("valve"), *below("valve", "cluster"), *below("valve", "route")])
def test_no_command_is_missing_from_the_page_of_commands(command):
    """`valve cluster report` and `valve demo memory` stood on none."""
    *words, name = command

    assert re.search(rf"`{' '.join(words)} (?:[^`]*[ |])?{name}\b", TEXTS["docs/cli.md"])


@pytest.mark.parametrize("page", PAGES)
def test_no_page_names_a_module_of_valve_that_nobody_can_run(page):
    """Those of tune are in an environment of their own."""
    found = set(re.findall(r"-m (valve[d_][\w.]*\w)", TEXTS[page]))
    missing = [name for name in found if not name.startswith("valve_tune") and importlib.util.find_spec(name) is None]

    assert missing == []


@pytest.mark.parametrize("page", MANUAL)
def test_no_page_of_the_manual_names_a_setting_that_does_not_exist(page):
    named = re.findall(rf"`((?:{'|'.join(TABLES)})\.[a-z_]+)(?:`| ?=)", TEXTS[page])
    files = (".md", ".py", ".toml", ".h", ".c", ".sock")

    assert [name for name in named if name not in SETTINGS and not name.endswith(files)] == []


@pytest.mark.parametrize("page", OF_THE_DAEMON)
def test_no_page_of_the_manual_names_a_setting_of_no_table(page):
    """By its unit: `let_ms`."""
    known = {name.rpartition(".")[2] for name in SETTINGS}
    named = set(re.findall(r"`((?!valve_)[a-z]+(?:_[a-z]+)*_(?:mib|ms|s|us|hour|ratio|bytes))`", TEXTS[page]))

    assert named - known == set()


def test_every_file_of_settings_that_the_manual_shows_is_read_by_valved(tmp_path):
    files = [block for page in MANUAL for block in re.findall(r"```toml\n(.*?)```", TEXTS[page], re.DOTALL)]
    file = tmp_path / "valved.toml"
    for text in files:
        file.write_text(re.sub(r'(group = )"[^"]*"', r'\1"root"', text))  # a group that each machine has
        load_config(file, {})

    assert len(files) >= 2


def test_the_pod_that_brings_the_plugin_of_an_engine_is_valid_and_passes_the_webhook():
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXTS["docs/engines.md"], re.DOTALL)
    spec = yaml.safe_load(block)["spec"]
    metadata = {"name": "p", "namespace": "default", "labels": {"valve.gpu/role": "offline"}}
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, "1.36", strict=True
    )

    spec["containers"][0]["resources"] = {"limits": {"valve.gpu/harvested-gpu": "1"}}
    admitted = mutate_offline({"metadata": {**metadata, "uid": "u"}, "spec": spec}, AdmissionSettings())["spec"]

    (engine,) = admitted["containers"]
    assert {"name": "PYTHONPATH", "value": "/hook"} in engine["env"]
    assert admitted["initContainers"][0]["command"][:3] == ["python", "-m", "valve_hook.export"]


@pytest.mark.parametrize("page", MANUAL)
def test_every_yaml_of_the_manual_can_be_read(page):
    for block in re.findall(r"```yaml\n(.*?)```", TEXTS[page], re.DOTALL):
        assert list(yaml.safe_load_all(block))

"""The checks of `make check` find what they are for: each is shown what breaks its rule, and what keeps it."""

from __future__ import annotations

import pytest
from valve_tools.check import firstlines, includes, names, pages, sharing, sizes, wiring

OWNER = "class Gate:\n    def __init__(self):\n        self.opened: Callable[[], None] = lambda: None\n"
LISTENER = "class {0}:\n    def __init__(self):\n        self.listener = Listener()\n"


@pytest.mark.parametrize(
    "line",
    [
        "gate.opened = self.thaw",
        "gate.opened = lambda: None",
        "gate.opened = sharing.after(x)",
        "gate.opened.append(f)",
    ],
)
def test_a_callable_is_never_set_from_another_file(line: str) -> None:
    sources = {"valved/gate/wake.py": OWNER, "valved/node/x.py": f"def build(gate, self):\n    {line}\n"}

    assert wiring.judge(sources) == [
        "valved/node/x.py:2: opened is set from outside; give it to the constructor, or tell the room's listener"
    ]


def test_a_figure_that_is_called_like_a_callable_is_no_finding() -> None:
    user = "def count(state):\n    state.opened = len(state.all)\n"

    assert wiring.judge({"valved/gate/wake.py": OWNER, "valved/node/x.py": user}) == []


@pytest.mark.parametrize(
    ("file", "function"),
    [("valved/compose.py", "build"), ("scheduler/valve_scheduler/extender/x.py", "__init__")],
)
def test_whoever_puts_parts_together_never_sets_their_attributes(file: str, function: str) -> None:
    owner = "class Consents:\n    def __init__(self):\n        self.pods: Pods | None = None\n"
    late = f"def {function}(consents, pods, self):\n    consents.pods = pods\n    self.x = 1\n    tls.minimum = 1\n"

    assert wiring.judge({"valved/clients/consents.py": owner, file: late}) == [
        f"{file}:2: pods is set where parts are put together; give it to the constructor"
    ]
    assert wiring.judge({"valved/clients/consents.py": owner, "valved/clients/x.py": late.replace(function, "f")}) == []


def test_a_room_never_has_two_listeners_and_the_daemon_never_five() -> None:
    rooms = {f"valved/{room}/a.py": LISTENER.format("A") for room in ("gate", "clients", "kv", "node")}
    assert wiring.judge(rooms) == []

    assert "kv has 2 listeners" in wiring.judge({**rooms, "valved/kv/b.py": LISTENER.format("B")})[0]
    assert wiring.judge({**rooms, "valved/kube/a.py": LISTENER.format("A")}) == [
        "the daemon has 5 listeners, 4 are allowed"
    ]


def test_of_twenty_functions_never_two_have_more_than_45_lines() -> None:
    short = [(f"valved/a.py:{n}", 10) for n in range(18)]

    assert list(sizes.long_functions([*short, ("valved/b.py:1", 46), ("valved/b.py:2", 10)])) == []
    assert list(sizes.long_functions([*short, ("valved/b.py:1", 46), ("valved/b.py:2", 50)])) == [
        "valved: 2 of 20 functions have more than 45 lines"
    ]


def test_what_is_over_its_cap_never_grows_and_leaves_its_list_when_it_is_small() -> None:
    listed = {"old.py": 500}

    def judged(found: dict[str, int]) -> list[str]:
        return list(sizes.over(found, 400, listed, "lines"))

    assert judged({"old.py": 500, "new.py": 400}) == []
    assert judged({"old.py": 501}) == ["old.py: 501 lines, 500 are allowed"]
    assert judged({"old.py": 500, "new.py": 401}) == ["new.py: 401 lines, 400 are allowed"]
    assert "take it out" in judged({"old.py": 400})[0]
    assert "nowhere else" in judged({})[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "import os\n"),
        ("a.py", '"""Helpers for the gate and its tests."""\n'),
        ("a.py", '"""The gate."""\n'),
        ("a.c", "#include <math.h>\n"),
        ("a.c", "/* SPDX-License-Identifier: MIT */\n#include <math.h>\n"),
    ],
)
def test_a_file_never_begins_without_a_line_that_says_what_it_does(name: str, text: str) -> None:
    assert firstlines.judge(name, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("__init__.py", ""),
        ("a.py", '"""Decides when offline work may run again."""\n'),
        ("a.c", "/*\n * SPDX-License-Identifier: MIT\n *\n * Waits on doorbells and closes gates.\n */\n"),
    ],
)
def test_a_first_line_that_says_what_the_file_does_is_no_finding(name: str, text: str) -> None:
    assert firstlines.judge(name, text) == ""


def test_no_second_class_of_one_name_comes_into_product_or_tools() -> None:
    one, other = "valved/kv/a.py", "patches/hook/b.py"

    assert names.judge([(one, "Place"), (other, "Engine"), ("tools/lab/granted/d.py", "Place")]) == []
    assert names.judge([(one, "Place"), ("tools/sim/d.py", "Place")]) == [
        "class Place is in tools/sim/d.py, valved/kv/a.py: give each a name of its own"
    ]
    assert names.judge([(one, "Place"), (other, "Place")]) == [
        f"class Place is in {other}, {one}: give each a name of its own"
    ]


def test_no_page_names_what_its_class_does_not_have() -> None:
    members = {"Ledger": {"admit", "launch", "dismiss"}}

    assert names.absent("Call `hook.Ledger.admit/launch` and `Ledger.dismiss()`, see `kv.h` and `Path`.", members) == []
    assert names.absent("Call `Ledger.admit/grow`, then `Booker.end`.", members) == [
        "Ledger.grow is in no class",
        "Booker.end is in no class",
    ]


def test_a_word_that_another_process_reads_is_never_zero_while_it_is_written() -> None:
    """pack_into clears its place first. A thread that is taken off the core just there leaves the zero for a while."""
    assert sharing.judge('struct.pack_into("<Q", page, 8, 7)\nHEAD.pack_into(page, 0, *head)\n') == [1, 2]
    assert sharing.judge('page[8:16] = struct.pack("<Q", 7)\nstruct.unpack_from("<Q", page)\n') == []


def test_a_page_never_names_or_links_to_a_file_that_is_not_there() -> None:
    files = ["room/README.md", "room/a.py", "room/deep/b.c", "room/deep/b.h", "docs/page.md"]
    good = "[a](a.py), `a.py`, `deep/b.{c,h}`, `room/a.py`, [docs](../docs/page.md#part), [web](https://x.org/y.py)"
    bad = "[a](old.py) and `gone.py`, `deep/b.{c,S}`"

    assert list(pages.missing(files, {"room/README.md": good})) == []
    assert list(pages.missing(files, {"room/README.md": bad})) == [
        "room/README.md: links to old.py, which is not there",
        "room/README.md: names gone.py, which is nowhere",
        "room/README.md: names deep/b.S, which is nowhere",
    ]


def test_a_room_is_never_left_out_of_every_page() -> None:
    files = ["a/README.md", "a/x.py", "a/in/x.py", "b/x.c", "tests/unit/x.py", "ARCHITECTURE.md", "c/__init__.py"]
    named = {"a/README.md": "`in/` holds the rest", "ARCHITECTURE.md": "| [b](b) | what it is |"}

    assert list(pages.unnamed(files, named)) == []
    assert [each.split(":")[0] for each in pages.unnamed(files, {"a/README.md": "", "ARCHITECTURE.md": "ab/b"})] == [
        "a/in",
        "b",
    ]


def test_a_table_of_files_never_leaves_one_out() -> None:
    files = ["a/README.md", "a/x.py", "a/y.c", "a/y.h", "a/__init__.py", "a/in/z.py"]
    whole = "| file | what |\n|---|---|\n| `x.py`, `y.c` | all |\n"

    assert list(pages.unlisted(files, {"a/README.md": whole})) == []
    assert list(pages.unlisted(files, {"a/README.md": whole.replace("`y.c`", "")})) == [
        "a/README.md: its table of files leaves out y.c",
        "a/README.md: its table of files leaves out y.h",
    ]


def test_a_page_never_names_a_decision_that_is_gone() -> None:
    page = 'see DECISIONS, "A kept" and DECISIONS.md, 2026-11-29,\n"An old one"'

    assert list(pages.undecided(["A kept one", "A new one"], {"docs/x.md": page})) == [
        'docs/x.md: names the entry "An old one", which is not in DECISIONS.md'
    ]


def test_the_readme_never_has_a_figure_that_no_results_page_has() -> None:
    table = (
        "| promise | measured | budget |\n|---|---|---|\n| launch | 6 / 17 us | 10 |\n| idle | **0.5 %** | 0.5 % |\n"
    )
    readme = f"    alone   29.3 ms   1.0 ms\n\n## Figures\n\n{table}\n## Limits\n| none | 9 | 9 |\n"
    result = "| launch | 6 / 17 us | load 1 |\n| idle | 0.5 % | load 1 |\n\n     alone 29.3 ms 1.0 ms\n"

    assert list(pages.unmeasured(readme, [result])) == []
    assert list(pages.unmeasured(readme, [result.replace("6 / 17", "6 / 18"), "0.5 % in words is no cell"])) == [
        "README.md: no table of docs/results has the figure '6 / 17 us'"
    ]
    assert list(pages.unmeasured(readme, [result.replace("29.3", "29.4")])) == [
        "README.md: no page of docs/results has the line 'alone 29.3 ms 1.0 ms'"
    ]


@pytest.mark.parametrize("header", ["valved/cells/cells.h", "valved/policy/greedy.h", "valved/native/gate.h"])
@pytest.mark.parametrize("user", ["valved/cells/x.c", "valved/policy/x.c", "valved/native/x.c"])
def test_a_room_of_c_never_includes_the_header_of_another(header: str, user: str) -> None:
    is_same = user.split("/")[:2] == header.split("/")[:2]

    assert includes._same_room(user, header.rsplit("/", maxsplit=1)[-1], {header}) == is_same

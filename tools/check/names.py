"""One word, one meaning: no second class of one name in the product.

TWICE are names that stand in exactly these files: results pages carry a hash of each of them, and a new name would make
pages stale whose figures nothing changed. Whoever renames one takes it out; nobody adds one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from valve_tools.check.sizes import classes

TWICE: Mapping[str, set[str]] = {
    "Verdict": {
        "scheduler/valve_router/plan/memory.py",
        "scheduler/valve_scheduler/controller/monitor.py",
    },
}


def findings() -> list[str]:
    return judge((file, node.name) for file, node in classes())


def judge(found: Iterable[tuple[str, str]], twice: Mapping[str, set[str]] = TWICE) -> list[str]:
    """(file, name of a class) of everything outside the tests; tools are no product."""
    places = defaultdict[str, set[str]](set)
    for file, name in found:
        if not file.startswith("tools/"):
            places[name].add(file)
    return [
        *(
            f"class {name} is in {', '.join(sorted(files))}: give each a name of its own"
            for name, files in sorted(places.items())
            if len(files) > 1 and files != twice.get(name)
        ),
        *(f"class {name} has one meaning now: take it out of TWICE" for name in twice if len(places[name]) < 2),
    ]


if __name__ == "__main__":
    problems = findings()
    print("\n".join(problems))
    raise SystemExit(bool(problems))

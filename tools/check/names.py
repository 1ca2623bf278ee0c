"""One word, one meaning: no second class of one name in product and tools.

PINNED are rooms whose files carry a hash on results pages: a new name there would make a page stale though no figure
changed. TWICE are names that stand in exactly these files, for the same reason (files there import them), or until the
rooms that use them are at rest. Whoever renames one takes it out; nobody adds one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from valve_tools.check.sizes import classes

PINNED = ("tools/lab/cotrain/", "tools/lab/granted/")
TWICE: Mapping[str, set[str]] = {
    "Claim": {"tools/sim/metrics.py", "valved/state/registry.py"},
    "Desk": {"scheduler/valve_router/training/desk.py", "tools/engines/scheduler_rig.py"},
    "Fleet": {"scheduler/valve_scheduler/placement/rank.py", "tools/lab/fleet/load.py"},
    "Pool": {"tools/engines/scheduler_toy.py", "valved/kv/pool.py"},
    "Run": {"scheduler/valve_scheduler/cli/measuring.py", "tools/lab/fleet/run.py"},
    "Settings": {"scheduler/valve_router/settings.py", "tools/sim/machine.py"},
    "Verdict": {"scheduler/valve_router/plan/memory.py", "scheduler/valve_scheduler/controller/monitor.py"},
    "Workers": {"tools/replay/work.py", "tune/valve_tune/serve/server.py"},
    "World": {"tools/lab/fleet/run.py", "tools/sim/world.py"},
}


def findings() -> list[str]:
    return judge((file, node.name) for file, node in classes())


def judge(found: Iterable[tuple[str, str]], twice: Mapping[str, set[str]] = TWICE) -> list[str]:
    """(file, name of a class) of everything outside the tests."""
    places = defaultdict[str, set[str]](set)
    for file, name in found:
        if not file.startswith(PINNED):
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

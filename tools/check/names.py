"""One word, one meaning: no second class of one name in the product.

TWICE are those that stood when the rule came. Whoever renames one takes it out; nobody adds one.
"""

from __future__ import annotations

from collections import defaultdict

from valve_tools.check.sizes import classes

TWICE = frozenset(
    {
        *("Engine", "Explanation", "Layout", "NoPlace", "Node", "Page", "Place", "Reach", "Refused"),
        *(
            "SchedulerHook",
            "Standing",
            "Unheeded",
            "Verdict",
        ),
    }
)


def findings() -> list[str]:
    places = defaultdict(set)
    for name, node in classes():
        if not name.startswith("tools/"):
            places[node.name].add(name)
    several = {name: files for name, files in places.items() if len(files) > 1}
    return [
        *(f"class {name} is in {', '.join(sorted(several[name]))}" for name in sorted(several.keys() - TWICE)),
        *(f"class {name} has one meaning now: take it out of TWICE" for name in sorted(TWICE - several.keys())),
    ]


if __name__ == "__main__":
    problems = findings()
    print("\n".join(problems))
    raise SystemExit(bool(problems))

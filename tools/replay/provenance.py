"""What made a page: a hash of the product's default settings and policy sources, printed on it and compared later.

Comments and docstrings do not count, nor do settings that no simulation takes: a page is stale when a run of today
could come out otherwise because the product decides otherwise. `valve replay stale FOLDER` names such pages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from valve_tools.replay.code import code_of

from valved.config import Config
from valved.policy.cooldown import CooldownSettings
from valved.policy.wake import WakeSettings

NODE_POLICIES = (
    "valved.policy.columns",
    "valved.policy.cooldown",
    "valved.policy.eviction",
    "valved.policy.handout",
    "valved.policy.reservation",
    "valved.policy.usage",
    "valved.policy.wake",
)
CLUSTER_POLICIES = (
    "valve_scheduler.controller.monitor",
    "valve_scheduler.model.alignment",
    "valve_scheduler.model.curve",
    "valve_scheduler.model.forecast",
    "valve_scheduler.model.memory",
    "valve_scheduler.model.peaks",
    "valve_scheduler.model.sets",
    "valve_scheduler.model.throughput",
    "valve_scheduler.placement.rank",
)
ROUTER_POLICIES = tuple(
    f"valve_router.plan.{name}" for name in ("defer", "memory", "profile", "score", "task", "timeline")
)
OF_THE_ROUTER = "routing"
OF_THE_CLUSTER = ("cluster", "fleet", "forecast")
"""Experiments that simulate no node's policies."""
OF_AN_ENGINE = ("eviction",)
"""Of which columns it loses, and in which order it hands out blocks: how much online keeps plays no part."""
ENGINE_POLICIES = tuple(f"valved.policy.{name}" for name in ("columns", "eviction", "handout"))
OF_BOTH = ("crowding",)
WITHOUT_HINTS = ("cooldown", "sensitivity", "whatif")
"""They simulate services without hints, too, for which how gaps are spread counts."""
OF_NO_POLICY = ("machine",)
LINE = "Product: settings and policies `{}`; `valve replay stale` compares.\n"
FOUND = re.compile(re.escape(LINE.strip()).replace(r"\{\}", "([0-9a-f]{16})"))


def made_with(experiment: str) -> str:
    """What a page of this experiment would carry if it was made now."""
    if experiment in OF_NO_POLICY:
        return _digest([])
    if experiment == OF_THE_ROUTER:
        return _digest([source(name) for name in ROUTER_POLICIES])
    if experiment in OF_THE_CLUSTER:
        return _digest([source(name) for name in CLUSTER_POLICIES])
    if experiment in OF_AN_ENGINE:
        return _digest([*(source(name) for name in ENGINE_POLICIES), repr(Config().eviction_settings())])
    of_both = CLUSTER_POLICIES if experiment in OF_BOTH else ()
    without = ("valved.policy.apart",) if experiment in WITHOUT_HINTS else ()
    return _digest([*(source(name) for name in (*NODE_POLICIES, *of_both, *without)), settings(Config())])


def stale(folder: Path) -> list[str]:
    """A line for every page below the folder that was made by a product that decided otherwise, or carries no hash."""
    found = []
    for page in sorted(folder.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        is_of_router = "python -m valve_tools.lab.fleet" in text
        if "`valve replay` builds it" not in text and not is_of_router:
            continue
        carried, wanted = FOUND.search(text), made_with(OF_THE_ROUTER if is_of_router else page.stem)
        if carried is None:
            found.append(f"{page}: carries no hash of the settings and policies that made it")
        elif wanted != carried.group(1):
            found.append(f"{page}: made with {carried.group(1)}, the product is {wanted}; run the experiment again")
    return found


def settings(config: Config) -> str:
    """The defaults that a simulated node takes."""
    taken: Iterable[Any] = (
        config.reservation_settings(),
        config.eviction_settings(),
        CooldownSettings(),
        WakeSettings(),
    )
    memory = config.memory
    asked = (memory.handle_mib, memory.remap, memory.cooperative_ratio, memory.offline_step_ms, memory.let_ms)
    named = [f"{type(one).__name__} {sorted(dataclasses.asdict(one).items())}" for one in taken]
    return "\n".join([*named, repr((*asked, memory.token_ns))])


def source(module: str) -> str:
    """A module's code without comments, docstrings and layout."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"{module} has no source")
    return code_of(Path(spec.origin).read_text(encoding="utf-8"))


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

"""`valve replay sensitivity`: one setting at a time, what it does to online and to offline, as tornado charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
from valve_tools.replay import svg
from valve_tools.replay.report import Cell, Chart, Report, ReportTable, plus_minus
from valve_tools.replay.work import TellProgress, Workers, spread
from valve_tools.sim.combinations import BY_NAME, OURS, run_combination, run_job_alone, run_solo
from valve_tools.sim.metrics import Interval, Summary, interval, summarise
from valve_tools.sim.pairs import PAIRS, Bound, bind
from valve_tools.sim.traces import Folder
from valve_tools.sim.tuning import Context, Tuning

MS = 1_000_000
SECOND = 1000 * MS
SHAPES = ("P1", "P3", "P5", "P7", "P8")
"""Compute bursts, KV bursts, short gaps, a tight pool, a periodic swing."""
SECONDS = 2 * 3600.0
DEFAULT = "default"
WITHOUT_HINT = "Channel without hint+OurMem"
NAMES = {
    "cooldown ceiling_ns": "cooldown ceiling",
    "cooldown floor_ns": "cooldown floor",
    "delta_ns": "delta",
    "target_per_hour": "reclaims per hour",
    "headroom_max_handles": "headroom, handles",
    "pressure_ratio": "pressure ratio",
    "hold_share": "hold share",
    "tau_start_ns": "tau at the start",
    "tau_min_ns": "least tau",
}
"""Fields of settings as a reader calls them; their values carry the unit."""


@dataclass(frozen=True, slots=True)
class NodeSetting:
    """One value of one parameter; `combination` is where it matters."""

    parameter: str
    label: str
    tuning: Tuning
    combination: str = OURS


def _reservation(parameter: str, values: Mapping[str, float]) -> list[NodeSetting]:
    base = Tuning()
    tried = {label: replace(base.reservation, **{parameter: value}) for label, value in values.items()}  # type: ignore[arg-type]
    return [NodeSetting(parameter, label, replace(base, reservation=one)) for label, one in tried.items()]


def _cooldown(parameter: str, values: Mapping[str, float]) -> list[NodeSetting]:
    base, name = Tuning(), f"cooldown {parameter}"
    tried = {label: replace(base.cooldown, **{parameter: value}) for label, value in values.items()}  # type: ignore[arg-type]
    return [NodeSetting(name, label, replace(base, cooldown=one), WITHOUT_HINT) for label, one in tried.items()]


def _with_handles(base: Tuning, mib: int) -> Tuning:
    """Another handle size, the same bytes of headroom at most."""
    most = base.reservation.headroom_max_handles * base.settings.handle_mib // mib
    return replace(
        base,
        settings=replace(base.settings, handle_mib=mib),
        reservation=replace(base.reservation, headroom_max_handles=most),
    )


def settings() -> list[NodeSetting]:
    """Every setting that is tried, a low and a high value for each parameter."""
    base = Tuning()
    return [
        *_cooldown("factor", {"1.5": 1.5, "4": 4.0}),
        *_cooldown("ceiling_ns", {"100 ms": 100 * MS, "500 ms": 500 * MS}),
        *_cooldown("floor_ns", {"1 ms": MS, "20 ms": 20 * MS}),
        *_reservation("alpha", {"1.25": 1.25, "4": 4.0}),
        *_reservation("beta", {"1.25": 1.25, "4": 4.0}),
        *_reservation("delta_ns", {"0.1 s": SECOND // 10, "10 s": 10 * SECOND}),
        *_reservation("target_per_hour", {"6": 6.0, "120": 120.0, "600": 600.0}),
        *_reservation("headroom_max_handles", {"32": 32, "64": 64, "512": 512}),
        *_reservation("pressure_ratio", {"0.9": 0.9, "0.97": 0.97}),
        *_reservation("hold_share", {"0.3": 0.3, "1": 1.0}),
        *_reservation("tau_start_ns", {"20 s": 20 * SECOND, "180 s": 180 * SECOND}),
        *_reservation("tau_min_ns", {"1 s": SECOND, "60 s": 60 * SECOND}),
        *(NodeSetting("handle size", f"{mib} MiB", _with_handles(base, mib)) for mib in (16, 256)),
        *(
            NodeSetting("stop latency", f"{us} us", replace(base, stop=replace(base.stop, median_ns=us * 1000.0)))
            for us in (100, 1000)
        ),
        NodeSetting("stop begins", "at the launch", replace(base, gate_on_hint=False)),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityTask:
    bound: Bound
    seed: int
    settings: tuple[NodeSetting, ...]


def run_task(task: SensitivityTask) -> dict[tuple[str, str, str], Summary]:
    """(parameter, label, combination) -> summary, for one pair and seed; solo is run once per machine."""
    found = {}
    solos: dict[object, tuple[object, float]] = {}
    bound = replace(task.bound, trace=task.bound.trace.first(SECONDS))
    for setting in task.settings:
        machine = setting.tuning.settings
        if machine not in solos:
            alone = run_job_alone(bound, task.seed, setting.tuning).offline_tokens_per_s
            solos[machine] = (run_solo(bound, task.seed, setting.tuning), alone)
        solo, alone = solos[machine]
        context = Context(bound=bound, seed=task.seed, solo=solo, tuning=setting.tuning)  # type: ignore[arg-type]
        result = run_combination(BY_NAME[setting.combination], context)
        found[setting.parameter, setting.label, setting.combination] = summarise(result, solo, alone)  # type: ignore[arg-type]
    return found


def run(folder: Folder, seeds: Sequence[int], progress: TellProgress, workers: Workers | None = None) -> Report:
    bounds = bind(folder, [pair for pair in PAIRS if pair.key in SHAPES])
    tried = (
        NodeSetting(DEFAULT, DEFAULT, Tuning()),
        NodeSetting(DEFAULT, DEFAULT, Tuning(), WITHOUT_HINT),
        *settings(),
    )
    tasks = [SensitivityTask(bound=bound, seed=seed, settings=tried) for seed in seeds for bound in bounds]
    return _report(tried, tasks, spread(run_task, tasks, progress, workers or Workers(), label="sensitivity"))


Runs = list[dict[tuple[str, str, str], Summary]]
Figure = Callable[[Summary], float]
Found = Mapping[str, Mapping[tuple[str, str, str], Interval]]
"""Figure -> setting -> its value over the seeds."""


def _report(tried: Sequence[NodeSetting], tasks: Sequence[SensitivityTask], runs: Runs) -> Report:
    found = {
        name: {_key(setting): figure(setting) for setting in tried} for name, figure in _figures(tasks, runs).items()
    }
    return report([_key(setting) for setting in tried], found, sorted({task.seed for task in tasks}))


def from_data(data: Mapping[str, Any], seeds: Sequence[int]) -> Report:
    """The same page from the figures of a `sensitivity.json`."""
    keys = [tuple(row[:3]) for row in data["rows"]]
    names = list(data["rows"][0][3])
    found = {name: {(*row[:3],): msgspec.convert(row[3][name], Interval) for row in data["rows"]} for name in names}
    return report(keys, found, seeds)


def report(keys: Sequence[tuple[str, str, str]], found: Found, seeds: Sequence[int]) -> Report:
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (NAMES.get(key[0], key[0]), *key[1:], *(plus_minus(of[key]) for of in found.values())) for key in keys
    )
    charts = [
        Chart(title=f"{name[0].upper()}{name[1:]}{suffix}", svg=_tornado(keys, combination, of, name))
        for combination, suffix in ((OURS, ""), (WITHOUT_HINT, ", without a hint"))
        for name, of in found.items()
        if combination == OURS or "reclaims" not in name
    ]
    return Report(
        name="sensitivity",
        title="Sensitivity: what each setting does",
        summary=(
            "One setting at a time on five shapes of load, two hours each; everything else at the product's defaults. "
            "Cooldown only matters for a service without a lifecycle hint, so it is varied there. ± is half the 95 % "
            "interval over the seeds.",
        ),
        tables=(ReportTable(title="All settings", columns=("parameter", "value", "combination", *found), rows=rows),),
        charts=tuple(charts),
        data={"rows": [[*key, {name: asdict(of[key]) for name, of in found.items()}] for key in keys]},
        seeds=tuple(seeds),
    )


def _figures(tasks: Sequence[SensitivityTask], runs: Runs) -> dict[str, Callable[[NodeSetting], Interval]]:
    """Each figure of a setting over the seeds."""

    def over_default(setting: NodeSetting) -> Interval:
        """Offline throughput over that of the defaults, mean over the pairs of one seed."""
        key, base = _key(setting), (DEFAULT, DEFAULT, setting.combination)
        by_seed: dict[int, list[float]] = {}
        for task, run in zip(tasks, runs, strict=True):
            if run[base].offline_tokens_per_s > 0:
                ratio = run[key].offline_tokens_per_s / run[base].offline_tokens_per_s
                by_seed.setdefault(task.seed, []).append(ratio)
        return interval([sum(ratios) / len(ratios) for ratios in by_seed.values()])

    def worst(figure: Figure) -> Callable[[NodeSetting], Interval]:
        """Of the pair whose mean over the seeds is worst."""

        def of(setting: NodeSetting) -> Interval:
            by_pair: dict[str, list[float]] = {}
            for task, run in zip(tasks, runs, strict=True):
                by_pair.setdefault(task.bound.pair.key, []).append(figure(run[_key(setting)]))
            return max((interval(values) for values in by_pair.values()), key=lambda one: one.mean)

        return of

    return {
        "offline throughput over the defaults'": over_default,
        "worst mean TTFT increase %": worst(lambda one: one.ttft_increase["mean"]),
        "worst reclaims in an hour": worst(lambda one: float(max(one.reclaims_by_hour))),
    }


def _key(setting: NodeSetting) -> tuple[str, str, str]:
    return setting.parameter, setting.label, setting.combination


def _tornado(
    keys: Sequence[tuple[str, str, str]], combination: str, of: Mapping[tuple[str, str, str], Interval], unit: str
) -> str:
    rows: dict[str, list[tuple[str, float]]] = {}
    for key in keys:
        parameter, label, where = key
        if where == combination and parameter != DEFAULT:
            rows.setdefault(NAMES.get(parameter, parameter), []).append((label, of[key].mean))
    return svg.tornado(list(rows.items()), centre=of[DEFAULT, DEFAULT, combination].mean, unit=unit)

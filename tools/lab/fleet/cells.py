"""The grid: the paper's models, rates and shares of training, sizes, bursts, wrong profiles and ablations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from valve_router.plan.profile import Law, Profile
from valve_tools.lab.fleet.load import MODELS, Arrivals, FleetShape
from valve_tools.lab.fleet.policies import FILLS, OURS, POLICIES, VARIANTS
from valve_tools.lab.fleet.run import Figures, FleetRun, FleetWorld
from valve_tools.sim.metrics import Interval, interval

SEEDS = 5
RATES = (4.0, 8.0, 16.0, 32.0)
SHARES = (0.1, 0.5, 0.9)
NODES, STAGES = (4, 16, 100), (1, 2, 4, 8)
PER_NODE_S = 1.0
HORIZON_S = 40.0
TRACES = ("azure2023_conv_first2100s", "azure2023_code_first2100s", "inst06_msmall_c31_t432000")
NOISE = 0.2
LEAST = "least response"
NO_PROFILE = Profile(stages=2, forward=Law(per_square_s=2e-6), backward=Law(per_square_s=1e-6), stop_s=0.001)
"""What the paper's code takes a model for that it has not measured."""
WITHOUT_GATE = (OURS, LEAST, "printed", "round robin", "separate")
OF_SIZES = (OURS, LEAST, "round robin", "least outstanding", "separate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One cell and the policies that run in it, on the same tasks."""

    table: str
    name: str
    world: FleetWorld
    policies: tuple[str, ...]
    seeds: int = SEEDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One policy in one setting: figures by seed."""

    table: str
    name: str
    policy: str
    busy: float  # of what the fleet can do
    figures: tuple[Figures, ...]

    def of(self, name: str) -> list[float]:
        return [float(getattr(one, name)) for one in self.figures]

    def mean(self, name: str) -> float:
        values = self.of(name)
        return sum(values) / len(values)


def work(setting: Setting) -> list[Cell]:
    found = []
    for name in setting.policies:
        policy = (POLICIES | VARIANTS | FILLS)[name]
        worlds = [replace(setting.world, seed=seed) for seed in range(1, setting.seeds + 1)]
        figures = tuple(FleetRun(world, policy).figures() for world in worlds)
        busy = busy_share(setting.world)
        found.append(Cell(table=setting.table, name=setting.name, policy=name, busy=busy, figures=figures))
    return found


def busy_share(world: FleetWorld) -> float:
    """Of a stage, if all were spread evenly."""
    forward_s, backward_s = MODELS[world.fleet.model]
    arrivals = world.arrivals
    return arrivals.per_s * (forward_s + arrivals.training * backward_s) / world.fleet.nodes


def settings(folder: str, count: int = 400) -> list[Setting]:
    """All of the page."""
    found = []
    for has_gate, model, per_s, share in product((True, False), MODELS, RATES, SHARES):
        fleet = FleetShape(model=model, has_gate=has_gate)
        arrivals = Arrivals(per_s=per_s, training=share, count=max(count, round(HORIZON_S * per_s)))
        policies = (*POLICIES, *VARIANTS) if has_gate and share == 0.5 else tuple(POLICIES)
        found.append(
            Setting(
                table="gate" if has_gate else "no gate",
                name=f"{model}, {per_s:g}/s, {100 * share:g} %",
                world=FleetWorld(fleet=fleet, arrivals=arrivals, seed=0),
                policies=policies if has_gate else (*WITHOUT_GATE, *(VARIANTS if share == 0.5 else ())),
            )
        )
    return [*found, *sizes(), *bursts(folder, count), *wrong(), *ablations(count)]


def sizes(nodes: Sequence[int] = NODES) -> list[Setting]:
    return [
        Setting(
            table="sizes",
            name=f"{count} x {stages}",
            world=FleetWorld(
                fleet=FleetShape(nodes=count, stages=stages),
                arrivals=Arrivals(per_s=PER_NODE_S * count, training=0.5, count=max(400, 20 * count)),
                seed=0,
            ),
            policies=OF_SIZES,
        )
        for count, stages in product(nodes, STAGES)
    ]


def bursts(folder: str, count: int) -> list[Setting]:
    return [
        Setting(
            table="bursts",
            name=f"{trace.split('_first')[0].split('_c31')[0]}, {per_s:g}/s, {100 * share:g} %",
            world=FleetWorld(
                fleet=FleetShape(),
                arrivals=Arrivals(per_s=per_s, training=share, count=count, trace=trace, folder=folder),
                seed=0,
            ),
            policies=(*POLICIES, *FILLS),
        )
        for trace, per_s, share in product(TRACES, (4.0, 8.0, 16.0), (0.25, 0.5))
    ]


def wrong() -> list[Setting]:
    """The planner's profile is off by a factor, each task by up to 20 %."""
    found = []
    for per_s, factor, is_calibrated in product((4.0, 8.0, 16.0), (0.5, 1.0, 2.0), (True, False)):
        world = FleetWorld(
            fleet=FleetShape(),
            arrivals=Arrivals(per_s=per_s, training=0.25),
            seed=0,
            noise=NOISE,
            is_calibrated=is_calibrated,
            believed=scaled(FleetShape().profile, factor),
        )
        said = "measured" if is_calibrated else "not measured"
        name = f"{per_s:g}/s, profile x {factor:g}, {said}"
        found.append(Setting(table="wrong profiles", name=name, world=world, policies=(OURS, LEAST)))
    return found


def scaled(profile: Profile, factor: float) -> Profile:
    forward, backward = (
        Law(fixed_s=factor * one.fixed_s, per_token_s=factor * one.per_token_s)
        for one in (profile.forward, profile.backward)
    )
    return replace(profile, forward=forward, backward=backward)


def ablations(count: int) -> list[Setting]:
    """As in the paper: its largest model, without a profile, without deferral. Four times the nodes, as its card's
    figures leave four of them overloaded at four tasks a second."""
    found = []
    for per_s in (4.0, 8.0):
        arrivals = Arrivals(per_s=per_s, training=0.5, count=count)
        for has_gate in (True, False):
            fleet = FleetShape(model="Llama-70B", nodes=16, has_gate=has_gate)
            world = FleetWorld(fleet=fleet, arrivals=arrivals, seed=0)
            gate = "gate" if has_gate else "no gate"
            without = replace(NO_PROFILE, stop_s=fleet.profile.stop_s)
            for said, believed in (("profile", None), ("no profile", without)):
                found.append(
                    Setting(
                        table="ablations",
                        name=f"{per_s:g}/s, {gate}, {said}",
                        world=replace(world, believed=believed),
                        policies=(OURS, *VARIANTS, "printed"),
                    )
                )
    return found


def quick() -> list[Setting]:
    """What a test can wait for."""
    found = []
    for has_gate, per_s, share in product((True, False), (4.0, 16.0), (0.1, 0.5)):
        world = FleetWorld(
            fleet=FleetShape(has_gate=has_gate), arrivals=Arrivals(per_s=per_s, training=share, count=200), seed=0
        )
        table, name = "gate" if has_gate else "no gate", f"Llama-8B, {per_s:g}/s, {100 * share:g} %"
        found.append(
            Setting(table=table, name=name, world=world, policies=(OURS, LEAST, "round robin", "separate"), seeds=2)
        )
    return found


def by_setting(cells: Iterable[Cell], table: str) -> dict[str, dict[str, Cell]]:
    found: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        if cell.table == table:
            found.setdefault(cell.name, {})[cell.policy] = cell
    return found


def apart(one: Cell, other: Cell, name: str) -> Interval:
    """The difference on the same tasks, over seeds. Attainment ends at 1, so differences are skewed: where a symmetric
    interval goes further down than any seed did, the worst seed counts."""
    found = [mine - its for mine, its in zip(one.of(name), other.of(name), strict=True)]
    wide = interval(found)
    return replace(wide, low=max(wide.low, min(found)))


def ratio(one: Cell, other: Cell, name: str) -> Interval:
    return interval([mine / its for mine, its in zip(one.of(name), other.of(name), strict=True)])

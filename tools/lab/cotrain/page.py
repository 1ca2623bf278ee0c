"""docs/results/cotrain: what its pages share, HARLI's page, and the one with all planners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import valve_tools.lab.cotrain
from valve_tools.lab.cotrain import harli, readings, shared
from valve_tools.lab.cotrain.cells import MARGINS, Cell
from valve_tools.replay.code import sources_of
from valve_tools.replay.svg import grouped_bars
from valve_tools.sim.metrics import Claim

LAWS = """\
Nothing here ran on a card. Machines are layer times as published (Vidur's tables) or rooflines with half of the peak,
and say which. Decode reaches its bandwidth at 45 % of the processors; below, it slows in proportion. Training takes its
share of the whole card's speed, LoRA's backward as long as forward. Two laws of interference: `bandwidth` (decode slows
where both ask for more than there is) and `linear` (besides, 40 % at all processors, which is what HARLI measured).
Beside decode without a bound (a second stream), decode takes 1.4 times as long and training keeps 0.6 of its speed.
Steps have 2 % noise, host gaps are log-normal. Planners are told data sheet figures that are a sixth off, and learn.
"""


SETTING_HARLI = f"""\
Two cards; prompts are made elsewhere; target {harli.TARGET.step_ms:g} ms a step, for planners that count credit also
the longest gap between two tokens; {harli.WINDOWS} windows of {harli.SECONDS:g} s of the Azure conversation trace with
all its requests, as in the paper. Separate decodes everything on one card and trains on the other; the others serve
half of the requests on each card. Tokens a second and card. Micro-batch 2 x 1,024. The Ada is a roofline; the A100 is
the layer table of the 80 GB card, rows that memory bounds stretched to 1.56 TB/s, Qwen by parameters.

Not judged here: H5 (uncontrolled sharing slows decode by up to 40 %) is what the law `linear` is made of, so no run can
confirm it; and of H9, that less than 100 MB are lost to fragments: nothing here allocates.
"""
SETTING_SHARED = f"""\
One engine with prompts and decode (8B; {shared.SETTING.micro_tokens:,} tokens a micro-batch). P99 TPOT within 2
or 4 times the machine's own step, and P99 TTFT within {shared.FIRST:g} times that of the service alone, over
the requests of {shared.WINDOWS} windows of each trace. A policy that misses either gets 0. Rivals without a
rule for requests get the margin under their step target ({", ".join(f"{margin:g}" for margin in MARGINS)}) that
suits them, chosen in hindsight; ours, granted and idle get none. Tokens a second and card that is used:
Separate uses two. `ours_shared` trains the served base over one copy of the weights, as `temporal`, `chunked`,
`llmstation` and `flexllm_greedy` do; the others can train any base, and have a copy of it.
"""


MORE = {"llmstation": ("llmstation_rest",)}
"""What makes figures of a page beside the module of its name."""


def sources(name: str) -> str:
    """A hash of what planned and simulated this page: other words about a planner make it no staler."""
    package = valve_tools.lab.cotrain.__name__
    return sources_of(*(f"{package}.{module}" for module in (name, *MORE.get(name, ()))))


def stale(folder: Path) -> list[str]:
    """Pages that another simulator or other planners made; what was measured on an engine is none."""
    return [
        str(path)
        for path in sorted(folder.glob("*.md"))
        if "sha256 `" in path.read_text("utf-8") and f"sha256 `{sources(path.stem)}`" not in path.read_text("utf-8")
    ]


def row(*values: object) -> str:
    return "| " + " | ".join(str(value) for value in values) + " |"


def table(title: str, head: Sequence[str], rows: Iterable[str]) -> str:
    return "\n".join([f"## {title}\n", row(*head), "|" + "---|" * len(head), *rows, ""])


def claims_table(claims: Sequence[Claim]) -> str:
    rows = [
        row(
            one.claim,
            one.pair,
            value,
            bound,
            one.note,
            verdict,
        )
        for one in claims
        for value, bound, verdict in [one.cells()]
    ]
    return table("Claims", ("claim", "in", "here", "bound", "paper", ""), rows)


def chart(svg: str) -> str:
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def foot(command: str) -> str:
    made = f"`python -m valve_tools.lab.cotrain {command} --traces DIR --out docs/results/cotrain` makes this page."
    return f"{made} Planners and simulator: sha256 `{sources(command)}`.\n"


def spread_of(cell: Cell) -> str:
    """Mean and range over the windows."""
    low, high = min(cell.tokens_s) / cell.cards, max(cell.tokens_s) / cell.cards
    return f"{cell.trained:,.0f}" if low == high else f"{cell.trained:,.0f} ({low:,.0f} to {high:,.0f})"


def _harli_rows(cells: Sequence[Cell]) -> Iterable[str]:
    bases = {(cell.machine, cell.note): cell for cell in cells if cell.policy == "separate"}
    for cell in cells:
        base = bases.get((cell.machine, cell.note))
        if base is not None:
            yield row(
                cell.machine,
                cell.note,
                cell.policy,
                spread_of(cell),
                f"{cell.trained / base.trained:.2f}",
                f"{cell.step99_ms:.1f}",
                f"{cell.tpot99_ms:.1f}",
                f"{cell.least_resident:.2f}",
            )


def harli_page(cells: Sequence[Cell], exact: dict[str, harli.Accuracy]) -> dict[str, str]:
    """File name to content."""
    found = harli.claims(cells, exact)
    charts = {}
    for law in harli.CONTENTION:
        names = list(harli.of(cells, "separate", law))
        series = {
            policy: [
                mine.trained / base.trained if (mine := harli.of(cells, policy, law).get(name)) else None
                for name, base in harli.of(cells, "separate", law).items()
            ]
            for policy in (*harli.POLICIES, *harli.SHARED)
        }
        charts[f"harli-{law}.svg"] = chart(
            grouped_bars([_pair(name) for name in names], series, unit="of Separate", bound=1.0)
        )
    other = [cell for cell in cells if cell.note == "TP" or cell.note.startswith("saturation")]
    errors = [
        row(
            law,
            *(f"{100 * value:.1f} %" for value in (one.solo_mean, one.solo_most, one.beside_mean, one.beside_most)),
            f"{one.predict_us:.0f} us",
            f"{one.minutes:.0f} min",
        )
        for law, one in exact.items()
    ]
    parts = [
        "# HARLI: training beside decode by split processors\n",
        LAWS,
        SETTING_HARLI,
        readings.harli_reading(cells),
        claims_table(found),
        "Ada roofline and A100 layer table, law `bandwidth`, over Separate:\n",
        "![over Separate, bandwidth law](harli-bandwidth.svg)\n",
        "The same under the law `linear`:\n\n![over Separate, linear law](harli-linear.svg)\n",
        table(
            "All runs",
            (
                "machine and models",
                "law",
                "policy",
                "tokens/s a card, mean (windows)",
                "over Separate",
                "P99 step ms",
                "P99 TPOT ms",
                "least of layers on the card",
            ),
            _harli_rows(cells),
        ),
        table(
            "Tensor parallel, and where decode saturates",
            ("machine", "set-up", "policy", "tokens/s a card", "P99 step ms"),
            (row(c.machine, c.note, c.policy, spread_of(c), f"{c.step99_ms:.1f}") for c in other),
        ),
        table(
            "HARLI's predictor on what it was not profiled on",
            ("law", "alone, mean", "alone, most", "beside, mean", "beside, most", "one prediction", "profile of pairs"),
            errors,
        ),
        foot("harli"),
    ]
    return {"harli.md": "\n".join(parts), **charts}


def _pair(machine: str) -> str:
    card, models = machine.split(", ")[:2]
    served, _, trained = models.partition(" trains ")
    return f"{card.split()[-1] if 'Ada' in card else 'A100'} {served[0]}-{(trained or served)[0]}"


def shared_page(cells: Sequence[Cell]) -> dict[str, str]:
    """All planners under one target."""
    found = shared.claims(cells)
    grouped = shared.groups(cells)
    charts, rows, out = {}, [], []
    for multiple in sorted({cell.note for cell in cells}):
        kept = {key: group for key, group in grouped.items() if key[2] == multiple and group["separate"].keeps}
        series: dict[str, list[float | None]] = {
            policy: [100 * shared.share(group, policy) for group in kept.values()] for policy in shared.POLICIES
        }
        if kept:
            charts[f"shared-{multiple}.svg"] = chart(
                grouped_bars(
                    [f"{_card(key[0])} {_load(key[1])}" for key in kept],
                    series,
                    unit="% of a dedicated card, for each card used",
                )
            )
    for (machine, load, multiple), group in grouped.items():
        if not group["separate"].keeps:
            out.append(
                row(machine, load, multiple, f"{group['separate'].tpot99_ms:.1f} of {group['separate'].goal_ms:.1f}")
            )
            continue
        for policy, cell in group.items():
            rows.append(
                row(
                    machine,
                    load,
                    multiple,
                    policy,
                    spread_of(cell) if cell.keeps else f"0 (**missed**; {cell.trained:,.0f})",
                    f"{cell.tpot99_ms:.1f} of {cell.goal_ms:.1f}",
                    f"{cell.ttft99_ms:.0f} of {cell.ttft_goal_ms:.0f}",
                    f"{cell.margin:g}" if cell.margin else "",
                    f"{cell.memory_gb:.0f}",
                    "yes" if cell.needs_engine else "no",
                )
            )
    parts = [
        "# All ways of training beside serving, under one target\n",
        LAWS,
        SETTING_SHARED,
        readings.shared_reading(cells),
        claims_table(found),
        *(
            f"Target {name.removeprefix('shared-').removesuffix('.svg')}:\n\n![tokens kept]({name})\n"
            for name in charts
        ),
        _summary(cells),
        table(
            "All runs",
            (
                "machine",
                "load",
                "target",
                "policy",
                "tokens/s a card (windows)",
                "P99 TPOT ms",
                "P99 TTFT ms",
                "margin",
                "GB of the trainer",
                "needs an engine patch",
            ),
            rows,
        ),
        table("Left out: the service alone misses the target", ("machine", "load", "target", "P99 TPOT ms"), out),
        foot("shared"),
    ]
    return {"shared.md": "\n".join(parts), **charts}


def _summary(cells: Sequence[Cell]) -> str:
    kept = shared.judged(cells)
    rows = []
    for policy in shared.POLICIES:
        mine = [group[policy] for group in kept]
        shares = [shared.share(group, policy) for group in kept]
        missed = sum(not one.keeps for one in mine)
        rows.append(
            row(
                policy,
                f"{100 * sum(shares) / max(len(shares), 1):.0f} %",
                f"{missed} of {len(mine)}",
                f"{max((one.memory_gb for one in mine), default=0):.0f}",
                "yes" if mine and mine[0].needs_engine else "no",
            )
        )
    return table(
        "By policy, over all groups",
        (
            "policy",
            "of a dedicated card, for each card used",
            "target missed",
            "GB of the trainer, most",
            "needs an engine patch",
        ),
        rows,
    )


def _card(machine: str) -> str:
    return machine.split(", ", maxsplit=1)[0].replace("RTX ", "").replace(" 80 GB", "").replace("6000 ", "")


def _load(load: str) -> str:
    stem, _, thin = load.partition("/")
    name = stem.replace("azure2023_", "").split("_")[0]
    return f"{name}/{thin}" if thin else name

"""What the pages of co-training say in words; every figure in these words is computed from the cells of the page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from valve_tools.lab.cotrain import flexllm, harli, shared
from valve_tools.lab.cotrain.cells import Cell

WIDTH = 120
QUICK = "A small part over drawn requests; nothing is claimed of it.\n"


def prose(text: str) -> str:
    """Paragraphs and list items, each filled; a blank line parts paragraphs, `- ` begins an item."""
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        parts = [" ".join(part.split()) for part in f"\n{paragraph}".split("\n- ")]
        lines = [textwrap.fill(parts[0], WIDTH)] if parts[0] else []
        lines += [textwrap.fill(part, WIDTH, initial_indent="- ", subsequent_indent="  ") for part in parts[1:]]
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs) + "\n"


def span(values: Sequence[float], digits: int = 0) -> str:
    """`3 to 8`, or one figure where both ends print alike."""
    low, high = f"{min(values):,.{digits}f}", f"{max(values):,.{digits}f}"
    return low if low == high else f"{low} to {high}"


def behind(ratios: Sequence[float]) -> str:
    """How many of these are below 1, and by how much."""
    below = [100 * (1 - ratio) for ratio in ratios if ratio < 1]
    return f"{len(below)} of {len(ratios)} groups, by {span(below)} %" if below else f"none of {len(ratios)} groups"


def _first(group: dict[str, Cell]) -> Cell:
    return next(iter(group.values()))


def _where(group: dict[str, Cell], rivals: Sequence[str], mine: str) -> str:
    """`A100 80 GB, azure2023_conv_first2100s/6 at 2x: 0.95 of harli_most_sm`."""
    best = max((group[name] for name in rivals if name in group), key=lambda cell: cell.kept_tokens)
    cell = group[mine]
    lead = shared.lead(group, mine, rivals)
    return f"{cell.machine.split(',')[0]}, {cell.load} at {cell.note}: {lead:.2f} of `{best.policy}`"


def shared_reading(cells: Sequence[Cell]) -> str:
    kept = shared.judged(cells)
    if not kept:
        return QUICK

    def worth(policy: str) -> str:
        return f"{100 * np.mean([shared.share(group, policy) for group in kept]):.0f} %"

    rivals = [name for name in shared.POLICIES if name not in shared.OURS]
    leads = [shared.lead(group, "ours", rivals) for group in kept]
    ahead = [100 * (lead - 1) for lead in leads if 1 <= lead < float("inf")]
    lost = [_where(group, rivals, "ours") for group, lead in zip(kept, leads, strict=True) if lead < 1]
    nothing = [g for g in kept if g["idle"].kept_tokens and g["granted"].kept_tokens < 1.001 * g["idle"].kept_tokens]
    chunky = [group for group in kept if not group["temporal"].keeps]
    slack = sum(not group["llmstation"].keeps for group in kept)
    misses = [name for name in ("ours", "granted") if any(not group[name].keeps for group in kept)]
    return prose(f"""\
What the runs say. Ours trains most in {len(ahead)} of the {len(kept)} groups, by {np.median(ahead or [0]):.0f} % in the
median and {max(ahead, default=0):.0f} % at most over the best rival with a margin found in hindsight. Targets missed by
ours or by granted time: {" and ".join(misses) if misses else "none"}. Ours has seen the requests once before they are
counted, as its reserve is learnt; the rivals' margins were fitted to them. Granted time leaves engine and trainer as
they are. It trains {worth("granted")} of a dedicated card in the mean, idle time {worth("idle")}, HARLI
{worth("harli_closest")}: what it lacks is what decode leaves of the processors while it runs. Where a claim is
missed, the cause:

- ours below a rival: {"; ".join(lost) if lost else "nowhere"}. The reserve of ours for prompts is kept back from every
request and spent by few. The rivals' zeros are targets missed by a little, so a group with a zero says little; the
figures beside the zeros say what was trained.
- `static_share` misses the first token's target, because prompts have 60 % of the card. `llmstation` misses in {slack}
groups, because a prompt's time is in no step's target. With its clamp it trains beside decode alone and leaves most of
a wide target unused.
- `temporal` passes where a micro-batch of {shared.SETTING.micro_tokens:,} tokens takes less than the quarter of the
first token's time that the target leaves; it misses in {len(chunky)} groups.
- granted time over idle time: in {len(nothing)} groups the policy grants next to nothing, and the two are alike: the
ratio is 1 but for rounding, and the claim asks for no less.

P99 over {span([_first(group).requests for group in kept])} requests a group is nearly the worst of them.
""")


def harli_reading(cells: Sequence[Cell]) -> str:
    goal = harli.TARGET.step_ms
    mine = [c for law in harli.CONTENTION for c in harli.of(cells, "ours", law).values()]
    over = [cell.step99_ms for cell in mine if cell.step99_ms > goal]
    tokens = sum(cell.tpot99_ms > goal for cell in mine)
    excess = [
        c.step99_ms / goal - 1 for law in harli.CONTENTION for c in harli.of(cells, "harli_closest", law).values()
    ]
    race = [cell for law in harli.CONTENTION for cell in harli.of(cells, "race", law).values()]
    if not mine or not race:
        return QUICK
    late = sum(cell.tpot99_ms > goal for cell in race)
    return prose(f"""\
What the runs say about the paper. On the Ada the mark is met by less than the printed mean: at {goal:g} ms a split in
tenths leaves decode 30 % of the processors, so at most 0.7 of each card trains. The A100's gain hangs on memory: with
two copies of the same base most layers are copied for each pass; over one copy (`harli_closest_shared`) the same
planner gains on both cards. Where a claim is missed, the cause:

- H3: the plan has no margin, and is kept until the prediction for it misses. The largest P99 step is
{100 * max(excess):.1f} % over the target.
- H4: our law has training in proportion to its processors; a gain of 2.01 on two cards needs a layer that runs as fast
on a part of them as on all.
- H6, H7: profiled up to 512 tokens and 64 sequences, asked up to 3,000 and 96. A batch of 96 on few processors is bound
by work and not by memory, which no line through smaller batches says. Stage two has no intercept, so it says a slowdown
where there is none: equal factors for every pair are no plane through the origin.
- ours plans by its readers' credit, and keeps no gap between two tokens above {harli.TARGET.gap_ms:g} ms: P99 TPOT is
over {goal:g} ms in {tokens} of {len(mine)} cells, and the P99 step in
{len(over)}{f" ({span(over)} ms)" if over else ""}.

`race` has a P99 TPOT over the target in {late} of {len(race)} cells: it counts step by step, and the gaps between steps
add to its pauses.
""")


def flexllm_reading(cells: Sequence[Cell]) -> str:
    kept = flexllm.judged(cells)
    narrow = [group for group in kept if flexllm.narrow(group)]
    tables = [group for group in kept if "step table" in _first(group).machine]
    if not narrow or len(narrow) == len(kept):
        return QUICK
    light = min(flexllm.rate_of(_first(group)) for group in tables)
    wide = [g for g in tables if not flexllm.narrow(g) and flexllm.rate_of(_first(g)) == light]

    def leads(groups: Sequence[dict[str, Cell]], mine: str) -> list[float]:
        return [flexllm.lead(group, mine, flexllm.GREEDY) for group in groups if group[flexllm.GREEDY].kept_tokens]

    def over_idle(policy: str) -> str:
        return span([group[policy].kept_tokens - group["idle"].kept_tokens for group in narrow])

    def slack_ms(groups: Sequence[dict[str, Cell]]) -> str:
        return span([group["separate"].goal_ms - group["separate"].tpot99_ms for group in groups])

    trains = [100 * (flexllm.lead(group, flexllm.GREEDY, "separate") - 1) for group in wide]
    passed = [group for group in narrow if flexllm.lead(group, flexllm.SPLIT, flexllm.GREEDY) >= 1.15]
    goals = dict.fromkeys((group["separate"].machine, group["separate"].goal_ms) for group in kept)
    met = sum(flexllm.loss(cells, flexllm.GREEDY, *goal) <= 0.2 for goal in goals)
    return prose(f"""\
What the runs say. On the step tables with a wide target FlexLLM trains {span(trains)} % more than Separate for each
card at the lightest load. With a narrow one its rows cost 11 ms before the first of them is of use, and beside decode
it trains next to nothing: what it trains is trained in idle time, which `idle` has as well. Where a claim is missed,
the cause:

- F12, loss from light to heavy load: met in {met} of {len(goals)} set-ups. On the step tables one request a second is
heavy: a prompt of 332 tokens takes 100 ms and an answer two seconds and more, so idle time, in which most of the light
load's tokens are trained, is gone. A target missed at the heaviest load counts as a loss of all.
- F15, where temporal sharing or a second stream loses no more than FlexLLM: they train in that idle time, too. Where
one misses its target at the lightest load already, it has nothing to lose, and F15 is void.
- ours with the same tiles, over FlexLLM under {flexllm.NARROW_MS:g} ms: {span(leads(narrow, flexllm.OURS), 2)}, where
1.15 is asked. Over `idle` FlexLLM adds {over_idle(flexllm.GREEDY)} tokens a second there and ours
{over_idle(flexllm.OURS)}; the idle time that both have hides it in the ratio.
- ours below FlexLLM: with the same tiles in {behind(leads(kept, flexllm.OURS))}; with split processors in
{behind(leads(kept, flexllm.SPLIT))}. It keeps a reserve for prompts, and leaves out rows that buy less than 60 % of
what the card could do. FlexLLM fills each step to its target, with the margin that was chosen for these requests. On
rooflines rows in the batch cost less than a split of the processors does.
- ours with split processors passes 1.15 in {len(passed)} of {len(narrow)} narrow groups, where the service alone is
within {slack_ms(narrow)} ms of its target at P99.
""")

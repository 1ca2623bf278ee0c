"""docs/results/cotrain/flexllm.md: its claims, a chart for each machine and target, and all runs."""

from __future__ import annotations

from collections.abc import Sequence

from valve_tools.lab.cotrain import flexllm
from valve_tools.lab.cotrain.cells import MARGINS, Cell
from valve_tools.lab.cotrain.page import LAWS, chart, claims_table, foot, row, spread_of, table
from valve_tools.lab.cotrain.steptables import LLAMA70B_STEPS
from valve_tools.replay.svg import curves

DEPTH = LLAMA70B_STEPS.depth_ms
TTFT_S = flexllm.TTFT_MS / 1e3
HINDSIGHT = ", ".join(f"{margin:g}" for margin in MARGINS)
SETTING = f"""\
Llama-3.1-70B and Yi-1.5-34B are FlexLLM's published step tables: what a step takes with so many training tokens in
it (70B: 58 ms with 8, 202 with 504, alone 46.6), or with so many layers of backward beside it. Depth costs
{DEPTH:g} ms a token, which meets the table's rows by depth within 3 %; Yi has none published and gets the same. Their
hardware is unnamed, so the rest of those machines (batch, context, prompts, split processors) is a **roofline** of the
A100 80 GB. The paper's own models run beside them: OPT-13B and LLaMA-30B as rooflines of four cards of 40 GB, and
LLaMA-2-70B as Vidur's layer table.

P99 TPOT within the target and P99 TTFT within {TTFT_S:g} s, as in the paper's later version, over the requests of
{flexllm.SEEDS} parts of {flexllm.SECONDS:g} s of a service with short answers
({flexllm.TRACE}: 332 tokens in, 49 out; the paper has 256 and 64), gaps scaled to the
rate; the trace of the paper cannot be had. A policy that misses a target gets 0. Prompts come in chunks of
{flexllm.SETTING.prompt_budget} tokens; a training sequence has {flexllm.SETTING.micro_tokens:,}. FlexLLM has the margin
({HINDSIGHT}) that suits it, temporal sharing the period (64, 128, 512 steps), both in hindsight; ours
has no knob, and has seen the requests once before they are counted. All are told the published table, FlexLLM
without depth, as it is published. `{flexllm.OURS}` has what FlexLLM has: rows in the batch, and layers on a
second stream. Tokens a second and card.
"""
READING = """\
What the runs say. On the step tables with a wide target (110 and 80 ms) FlexLLM trains a quarter more than Separate
for each card at light load. With a narrow one its rows cost 11 ms before the first of them is of use, and beside decode
it trains next to nothing: what it trains is trained in idle time, which `idle` has as well. Where a claim is missed,
the cause:

- F12, loss from light to heavy load: met on OPT-13B (0.15). On the step tables one request a second is heavy: a prompt
  of 332 tokens takes 100 ms and an answer two seconds and more, so idle time, in which most of the light load's tokens
  are trained, is gone. LLaMA-30B loses a third at 10 requests a second, most of it past 4. On Vidur's table of the 70B
  FlexLLM misses a target at 10 requests a second, and is counted as 0.
- F15, where temporal sharing or a second stream loses no more than FlexLLM: they train in that idle time, too.
- ours with the same tiles, over FlexLLM under 25 ms: 1.08 to 1.09 and not 1.15. Over `idle` FlexLLM adds 0 to 2 tokens
  a second there and ours 9 to 32; the idle time that both have hides it in the ratio.
- ours below FlexLLM at heavy load (nine groups with the same tiles, by 1 to 14 %; four with split processors, by 2 to
  18 %): it keeps a reserve for prompts, and leaves out rows that buy less than 60 % of what the card could do.
  FlexLLM fills each step to its target, with the margin that was chosen for these requests. On rooflines rows in the
  batch cost less than a split of the processors does.
- ours with split processors passes 1.15 in two of four narrow groups. In the others (0.5 requests a second) the service
  alone is within 3 ms (70B) or 9 ms (34B) of the target at P99: missed targets have taken its steady share away.
"""


def _rows(cells: Sequence[Cell]) -> list[str]:
    return [
        row(
            cell.machine,
            f"{cell.goal_ms:g}",
            f"{flexllm.rate_of(cell):g}",
            cell.policy,
            spread_of(cell) if cell.keeps else f"0 (**missed**; {cell.trained:,.0f})",
            f"{cell.tpot99_ms:.1f}",
            f"{cell.ttft99_ms:,.0f}",
            f"{cell.margin:g}" if cell.margin else "",
        )
        for group in flexllm.judged(cells)
        for cell in group.values()
    ]


def flexllm_page(cells: Sequence[Cell]) -> dict[str, str]:
    """File name to content."""
    charts, parts = {}, []
    setups = dict.fromkeys((group["separate"].machine, group["separate"].goal_ms) for group in flexllm.judged(cells))
    for place, (machine, goal_ms) in enumerate(setups, 1):
        kept = [
            g for g in flexllm.judged(cells) if (g["separate"].machine, g["separate"].goal_ms) == (machine, goal_ms)
        ]
        lines = {
            name: [(flexllm.rate_of(group[name]), group[name].kept_tokens) for group in kept]
            for name in flexllm.POLICIES
        }
        name = f"flexllm-{place}.svg"
        charts[name] = chart(curves(lines, x_unit="requests/s", y_unit="tokens/s a card, targets kept"))
        parts.append(f"{machine}, {goal_ms:g} ms:\n\n![tokens kept over the rate]({name})\n")
    out = [
        row(group["separate"].machine, f"{goal_ms:g}", f"{rate:g}", f"{group['separate'].tpot99_ms:.1f}")
        for (_, goal_ms, rate), group in flexllm.groups(cells).items()
        if not group["separate"].keeps
    ]
    head = ("machine", "target ms", "requests/s", "policy", "tokens/s a card (parts)", "P99 TPOT ms", "P99 TTFT ms")
    text = [
        "# FlexLLM: training tokens in the batch of the engine\n",
        LAWS,
        SETTING,
        READING,
        claims_table(flexllm.claims(cells)),
        *parts,
        table("All runs", (*head, "margin"), _rows(cells)),
        table(
            "Left out: the service alone misses the target", ("machine", "target ms", "requests/s", "P99 TPOT ms"), out
        ),
        foot("flexllm"),
    ]
    return {"flexllm.md": "\n".join(text), **charts}

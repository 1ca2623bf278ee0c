"""docs/results/cotrain/flexllm.md: its claims, a chart for each machine and target, and all runs."""

from __future__ import annotations

from collections.abc import Sequence

from valve_tools.lab.cotrain import flexllm
from valve_tools.lab.cotrain.cells import MARGINS, Cell
from valve_tools.lab.cotrain.page import LAWS, chart, claims_table, foot, row, spread_of, table
from valve_tools.lab.cotrain.readings import flexllm_reading
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

Not judged here: F13 (a third less memory in all than peft) needs peft's whole memory on cards. F14 is arithmetic on
shapes: `tests/tune/test_pruning.py` holds our formula to it for the 70B (71 to 74 % pruned, 85 % and more in all). F16,
the case study, gives no unit and rests on a trace that cannot be had.
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
        flexllm_reading(cells),
        claims_table(flexllm.claims(cells)),
        *parts,
        table("All runs", (*head, "margin"), _rows(cells)),
        table(
            "Left out: the service alone misses the target", ("machine", "target ms", "requests/s", "P99 TPOT ms"), out
        ),
        foot("flexllm"),
    ]
    return {"flexllm.md": "\n".join(text), **charts}

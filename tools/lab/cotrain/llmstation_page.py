"""docs/results/cotrain/llmstation.md: its systems over the rate of requests, and its other claims."""

from __future__ import annotations

from collections.abc import Sequence

from valve_tools.lab.cotrain import llmstation
from valve_tools.lab.cotrain.page import LAWS, chart, claims_table, foot, row, table
from valve_tools.replay.svg import curves
from valve_tools.sim.metrics import Claim

SETTING = f"""\
8B over two RTX 3090, both rooflines; P99 TTFT within {llmstation.GOAL.ttft_ms:g} ms and P99 TPOT within
{llmstation.GOAL.step_ms:g} ms. {llmstation.SEEDS} seeds of {llmstation.SECONDS:g} s at each rate; their
requests are judged together. Lengths of a chat service ({llmstation.TRACE}), prompts up to
{llmstation.MOST_PROMPT:,} tokens. Each system gets the value of its knob that suits it at each rate (margin,
chunk, share); what misses a target counts 0. `ours_shared` has no knob. `bursty` takes the service's own gaps,
scaled to the rate. A sample has {llmstation.SAMPLES["padded"]} tokens (`padded`, as the artifact pads) or
{llmstation.SAMPLES["short"]} (`short`, about Alpaca's).
"""
READING = """\
What the runs say. Over temporal sharing the claim holds in every set-up. With its clamp the planner lets backward
layers run beside decode alone, whatever the target leaves: at 50 ms most of the slack is unused. `llmstation, whole
slack` is the same planner without that bound, and the one to compare with the paper. Where a claim is missed, the
cause:

- over chunked: on a roofline of this card a chunk of 64 tokens is bound by work already, so short chunks lose
  nothing, and ours is exact, shares the base and fills the slack. The paper's is a process of its own with another
  copy, cut to the chunk; its short chunks use a card badly, which no roofline says. The claim rests on that set-up.
- over a fixed share: by our law decode needs 45 % of the processors, so a share costs it little; nothing here
  charges two processes for switching, nor for the second copy beyond its memory.
- as load rises: two requests a second of these lengths do not fill two cards, so nobody has fallen to zero yet.
  Temporal has fallen furthest.

- at no less trained (L4, L5): the paper's factors in TTFT (17 and 90) are those of a rival whose queue has run over. At
  these rates nobody's queue does here, so all wait alike. Which part of the set-up makes the difference was not
  isolated. L3 over a server that trains alone is met by the planner without the clamp.
- L8 is easy here: the features of the predictor are those of the laws that make the times.

Not judged here, and why:

- L1 is the range of L2 and L3 over all rivals and loads; it is judged there.
- L6, suspension inside autograd, is no matter of the simulator. `python tools/tune/bench.py --hidden 512 --rounds 3`
  measures it on a CPU (two cores, load 2). One suspension takes 10 us; after each of six layers that is 0.015 % of the
  backward. A question before each of another model's operators takes 0.7 us, 0.10 % (budget 0.5 %). What it costs under
  tensor parallelism needs cards.
- L9, eight adapters: no law says what a decode batch over many adapters takes, and none is published.
- no machine is an A40: the layer tables beside the traces hold an A100 and an H100 alone. No claim here rests on one.
"""


def llmstation_page(points: Sequence[llmstation.Point], rest: Sequence[Claim]) -> dict[str, str]:
    """LLMStation's systems over the rate of requests."""
    charts, parts = {}, []
    for arrivals, sample in sorted({(one.arrivals, one.sample) for one in points}, reverse=True):
        by_system = llmstation.series(points, arrivals, sample)
        name = f"llmstation-{arrivals}-{sample}.svg"
        lines = {system: [(one.rate, one.kept_tokens) for one in found] for system, found in by_system.items()}
        charts[name] = chart(curves(lines, x_unit="requests/s", y_unit="tokens/s trained, targets kept"))
        parts.append(f"RTX 3090 roofline, {arrivals} arrivals, {sample} samples:\n\n![tokens kept]({name})\n")
    rows = (
        row(
            one.arrivals,
            one.sample,
            f"{one.rate:g}",
            one.system,
            f"{one.tokens_s:,.0f}" if one.keeps else f"0 (**missed**; {one.tokens_s:,.0f})",
            f"{one.tpot99_ms:.1f}",
            f"{one.ttft99_ms:.0f}",
        )
        for one in points
    )
    head = ("arrivals", "samples", "requests/s", "system", "tokens/s", "P99 TPOT ms", "P99 TTFT ms")
    text = [
        "# LLMStation: training beside decode, layer by layer\n",
        LAWS,
        SETTING,
        READING,
        claims_table([*llmstation.claims(points), *rest]),
        *parts,
        table("All runs", head, rows),
        foot("llmstation"),
    ]
    return {"llmstation.md": "\n".join(text), **charts}

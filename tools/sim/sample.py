"""Which minutes of a long load are simulated: some from all of it, so that nights and weekends have their share.

Many short slices, since loads come in clusters: on 100 services of a drawn week 29 slices of 12 minutes were off the
week's load by twice as much as 241 of one minute. What is open at the end of a slice is open in the next.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from valve_tools.sim.shape import LONGEST_S
from valve_tools.sim.traces import NS, Trace, TraceSample

SLICES = 241
"""A prime: of days and weeks of whole hours no two slices have the same time of day."""
SLICE_S = 60
RULE = (
    f"A load of more than {LONGEST_S / 3600:g} hours is judged by a sample: it is cut into {SLICES} equal parts, and "
    "the middle minute of each is simulated, one after another. Of a week that is a minute in every 42, each at "
    "another time of day; what lasts less than that may be missed."
)


def sampled(trace: Trace) -> Trace:
    """The slices of a load that is longer than is simulated; a shorter load as it is."""
    if trace.duration_s < LONGEST_S:
        return trace
    slice_ns, part_ns = SLICE_S * NS, int(trace.arrive_ns[-1]) // SLICES
    starts_ns = np.arange(SLICES) * part_ns + (part_ns - slice_ns) // 2
    first, end = np.searchsorted(trace.arrive_ns, (starts_ns, starts_ns + slice_ns))
    rows = np.concatenate([np.arange(*each) for each in zip(first, end, strict=True)])
    moved_ns = np.repeat(starts_ns - np.arange(SLICES) * slice_ns, end - first)
    return replace(
        trace,
        arrive_ns=trace.arrive_ns[rows] - moved_ns,
        in_tok=trace.in_tok[rows],
        out_tok=trace.out_tok[rows],
        sample=TraceSample(seconds=SLICES * SLICE_S, of_requests=trace.requests, of_s=trace.duration_s),
    )

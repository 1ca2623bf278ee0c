"""The throughput model T(w, n) = T0 * I * M * A, as pure numpy.

What a node reports (per GPU: idle share, histogram of free memory; per pair: alignment of busy time) is
combined with what is known of a workload (throughput against free memory) into the share of standalone
throughput to expect. Nothing here knows of time, Kubernetes or files; schedulers and simulators call the same
functions."""

from valve_scheduler.model.alignment import admitted_sets, pair_alignment, runnable_share
from valve_scheduler.model.curve import ThroughputCurve, WorkloadProfile, prior_profile
from valve_scheduler.model.forecast import forecast, windows_of
from valve_scheduler.model.history import belief, history_s
from valve_scheduler.model.memory import (
    HISTOGRAM_BINS,
    fits_share,
    free_histogram,
    memory_factor,
    memory_weights,
)
from valve_scheduler.model.pairs import pair_indices
from valve_scheduler.model.peaks import SPARE_SHARE, has_room, held_mib, peak_mib
from valve_scheduler.model.sets import MAX_GPUS, set_members
from valve_scheduler.model.throughput import best_sets, idle_share, set_throughput

__all__ = [
    "HISTOGRAM_BINS",
    "MAX_GPUS",
    "SPARE_SHARE",
    "ThroughputCurve",
    "WorkloadProfile",
    "admitted_sets",
    "belief",
    "best_sets",
    "fits_share",
    "forecast",
    "free_histogram",
    "has_room",
    "held_mib",
    "history_s",
    "idle_share",
    "memory_factor",
    "memory_weights",
    "pair_alignment",
    "pair_indices",
    "peak_mib",
    "prior_profile",
    "runnable_share",
    "set_members",
    "set_throughput",
    "windows_of",
]

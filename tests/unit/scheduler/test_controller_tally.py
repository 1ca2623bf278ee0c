"""Counters of what was saved, promised and kept."""

from __future__ import annotations

import dataclasses

import pytest
from valve_scheduler import metrics
from valve_scheduler.controller.monitor import MonitorSettings, Sample, observe
from valve_scheduler.controller.tally import SavedCounter, closed, count

SETTINGS = MonitorSettings(window_s=600.0, warm_up_s=0.0)
SAMPLE = Sample(
    pod_uid="p",
    owner_uid="o",
    node="n",
    sla=0.5,
    standalone_tokens_per_s=10.0,
    runtime_s=3600.0,
    demand_s=0.0,
    tokens=0.0,
    namespace="tally",
    gpus=2,
)


def value(counter):
    return counter.labels("tally")._value.get()


def windows(*tokens):
    """Samples ten minutes of demand apart."""
    track, steps = None, []
    for number, made in enumerate(tokens):
        sample = dataclasses.replace(SAMPLE, demand_s=600.0 * number, tokens=float(made))
        after = observe(track, sample, SETTINGS)
        steps.append(({"p": track} if track else {}, {"p": after}))
        track = after
    return steps


@pytest.mark.parametrize(("tokens", "kept_s"), [(600, 120.0), (3000, 600.0), (6000, 600.0)])
def test_what_was_reached_counts_up_to_what_was_promised(tokens, kept_s):
    """Half of ten tokens a second over ten minutes on two GPUs: 600 GPU-seconds are promised."""
    promised, kept = value(metrics.promised_total), value(metrics.kept_total)

    for before, after in windows(0, tokens):
        count(before, after)

    assert value(metrics.promised_total) - promised == pytest.approx(600.0)
    assert value(metrics.kept_total) - kept == pytest.approx(kept_s)


def test_a_window_is_counted_once_however_often_it_is_looked_at():
    (first, second) = windows(0, 3000)
    between = {"p": observe(second[1]["p"], dataclasses.replace(second[1]["p"].sample, demand_s=900.0), SETTINGS)}

    assert not list(closed(*first))
    assert [span for _, span in closed(*second)] == [600.0]
    assert not list(closed(second[1], between))


def test_a_new_leader_never_counts_an_account_s_past_as_saved_now():
    tally, before = SavedCounter(), value(metrics.saved_total)

    tally.show("tally", {"savedSeconds": 5000.0})
    tally.show("tally", {"savedSeconds": 5007.0})

    assert value(metrics.saved_total) - before == pytest.approx(7.0)

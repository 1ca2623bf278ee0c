"""training.html and metrics.jsonl: what is shown is what was written."""

from __future__ import annotations

import pytest
from valve_tune.serve import metrics, page
from valve_tune.train.report import TrainEvent
from valve_tune.train.spec import JobSpec

SPEC = JobSpec(model="/m", data="/d/<b>.jsonl", out="/o/mine", max_steps=9)


def line(step, at, seconds=1.0, loss=1.0):
    return {"kind": "step", "step": step, "time": at, "seconds": seconds, "loss": loss, "tokens": 7}


def test_the_strip_shows_the_stretches_in_which_it_ran():
    steps = [line(1, 11.0), line(2, 12.0), line(3, 30.0), line(4, 31.0, 0.9)]
    assert page.ran(steps) == [(10.0, 12.0), (29.0, 31.0)]
    assert "19%" in page.strip(steps)  # 4 of 21 seconds


def test_a_long_curve_keeps_its_extremes_and_its_order():
    steps = [line(step, float(step), loss=1.0) for step in range(1, 20_001)]
    steps[7_777]["loss"], steps[12_345]["loss"] = 9.0, 0.1
    thin = page.thinned(steps)
    assert len(thin) <= page.POINTS
    assert {9.0, 0.1} <= {each["loss"] for each in thin}
    assert [each["step"] for each in thin] == sorted(each["step"] for each in thin)


@pytest.mark.parametrize("steps", [[], [line(1, 5.0)], [line(1, 5.0, loss=float("nan"))]], ids=["none", "one", "nan"])
def test_a_page_of_few_steps_is_whole_and_names_are_escaped(steps):
    whole = page.render(SPEC, "running", steps)
    assert whole.endswith("</html>\n")
    assert "&lt;b&gt;" in whole
    assert "<b>" not in whole


def test_a_line_that_a_crash_cut_short_spoils_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics.MetricsFile(path).write(TrainEvent(kind="step", step=1, loss=2.0))
    with path.open("a") as file:
        file.write('{"kind": "step", "step": 2, "lo')
    again = metrics.MetricsFile(path)
    again.write(TrainEvent(kind="step", step=2, loss=1.5))
    again.write(TrainEvent(kind="step", step=1, loss=2.5))
    assert [(each["step"], each["loss"]) for each in metrics.steps(path)] == [(1, 2.5), (2, 1.5)]

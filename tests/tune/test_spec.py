"""A job's fields: bounded, finite, named in errors, the same after a round trip."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from valve_tune.train.spec import REFUSED, JobSpec, SpecError

GOOD = {"model": "/m", "data": "/d.jsonl", "out": "/o", "max_steps": 10}
NUMBERS = [each for each in dataclasses.fields(JobSpec) if "low" in each.metadata]


def test_a_job_is_the_same_after_a_round_trip():
    spec = JobSpec.from_values({**GOOD, "lora_r": 4, "target_modules": ["q_proj"], "learning_rate": 1e-3})
    assert JobSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("each", NUMBERS, ids=lambda each: each.name)
def test_no_number_outside_its_bounds_makes_a_job(each):
    low, high = each.metadata["low"], each.metadata["high"]
    for wrong in (low - 1, high + 1, float("nan"), float("inf"), -float("inf"), "3", None, True, [1], 10**400):
        with pytest.raises(SpecError) as error:
            JobSpec.from_values({**GOOD, each.name: wrong})
        assert error.value.field == each.name


@given(st.dictionaries(st.sampled_from([each.name for each in dataclasses.fields(JobSpec)]), st.from_type(object)))
def test_whatever_the_values_are_the_error_names_a_field_or_the_job_is_whole(values):
    try:
        spec = JobSpec.from_values({**GOOD, **values})
    except SpecError as refused:
        name = refused.field
        assert name
    else:
        assert JobSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_offered_is_refused_by_name_with_the_way_round(name):
    with pytest.raises(SpecError, match=name) as error:
        JobSpec.from_values({**GOOD, name: True})
    assert REFUSED[name] in str(error.value)


@pytest.mark.parametrize("document", ["", "[]", "{", '{"model": "/m"}', json.dumps({**GOOD, "lr": 1})])
def test_a_job_file_that_makes_no_sense_says_what_is_wrong(document):
    with pytest.raises(SpecError):
        JobSpec.from_json(document)


def test_two_jobs_differ_in_the_fields_that_differ():
    one, other = JobSpec(**GOOD), JobSpec(**{**GOOD, "lora_r": 8})
    assert one.differs(other) == {"lora_r": (16, 8)}
    assert one.differs(one) == {}


def test_fields_that_contradict_each_other_are_named():
    with pytest.raises(SpecError, match="warmup_steps"):
        JobSpec(**{**GOOD, "warmup_steps": 11})
    with pytest.raises(SpecError, match="span"):
        JobSpec(**{**GOOD, "max_length": 100, "span": 33})

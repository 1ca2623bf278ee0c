"""What is out of the ordinary in a vLLM's steps, told by looking at as little as may be."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import example, given
from hypothesis import strategies as st
from valve_hook.followed import Followed
from valve_hook.vllm.rows import StepRows, row

NAMES = "abc"
KINDS = ["end", "arrive", "strange", "prompt", "out", "back", "leave"]
CHANGES = st.lists(st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(NAMES)), max_size=4), max_size=12)


class Engine:
    """Requests that decode, are at their prompt, are put out, or end; some came before anybody followed them."""

    def __init__(self):
        self.running, self.at_prompt, self.out, self.reading = [], set(), set(), Followed()

    def step(self, changes, rows, fronts):
        """What the step's rows say, and what a look at each of them says."""
        ending = set()
        for change, name in changes:
            if change in ("arrive", "strange") and name not in self.running:
                self.running.append(name)
                if change == "arrive":
                    self.reading.arrived(name, 10, streamed=True)
            elif change == "end":
                ending.add(name)
            elif change == "prompt":
                self.at_prompt.add(name)
            elif change == "out":
                self.out.add(name)
            elif change == "back":
                self.at_prompt.discard(name)
                self.out.discard(name)
            elif change == "leave" and name in self.running:
                self._gone(name)
        scheduled = [name for name in self.running if name not in self.out]
        served = [name for name in scheduled if name not in self.at_prompt]
        outputs = [
            SimpleNamespace(request_id=n, new_token_ids=[7], finish_reason="length" if n in ending else None)
            for n in served
        ]
        batches = [SimpleNamespace(outputs=outputs[front::fronts]) for front in range(fronts)]
        reading = self.reading.readers
        said = rows.told(dict.fromkeys(scheduled, 1), batches, reading)
        full = [row(each) for each in outputs if each.finish_reason is not None or each.request_id not in reading]
        before = set(reading)
        self.reading.delivered(said[0], said[1], said[2])
        for name in ending & set(served):
            self._gone(name)
        return said, full, before, set(served)

    def _gone(self, name):
        self.running.remove(name)
        self.reading.forget(name)


@example([[("arrive", "a")], [("arrive", "b"), ("prompt", "b")], [("back", "b")]], 1)  # a first token after chunks
@example([[("arrive", "a"), ("arrive", "b")], [("strange", "c"), ("out", "b")]], 1)  # as many as read, not the same
@given(CHANGES, st.integers(min_value=1, max_value=3))
def test_a_row_out_of_the_ordinary_is_never_passed_by(steps, fronts):
    engine, rows = Engine(), StepRows()
    for changes in steps:
        for each in (changes, (), ()):  # steps in which nothing changes lie between
            (odd, plain, names), full, reading, served = engine.step(each, rows, fronts)

            assert sorted(odd) == sorted(full)
            assert plain == len(served) - len(full)
            assert reading <= served if names == () else set(names) == served  # whoever got none is looked for by name


class Counted(SimpleNamespace):
    """An output of a step that counts who asks for its tokens."""

    looks = 0

    def __getattribute__(self, name):
        if name == "new_token_ids":
            Counted.looks += 1
        return super().__getattribute__(name)


def test_a_step_like_the_one_before_never_looks_at_each_requests_tokens():
    names, rows, reading = ["a", "b", "c"], StepRows(), {"a": 1, "b": 2, "c": 3}
    batch = SimpleNamespace(outputs=[Counted(request_id=n, new_token_ids=[7], finish_reason=None) for n in names])
    rows.told(names, (batch,), reading)
    before = Counted.looks

    assert rows.told(names, (batch,), reading) == ([], 3, ())
    assert Counted.looks == before
    batch.outputs[1].finish_reason = "length"
    assert rows.told(names, (batch,), reading) == ([("b", 1, True)], 2, ())
    assert Counted.looks == before + 1


def test_a_step_never_passes_for_known_once_other_readers_are_followed():
    """The owner has consented anew: whoever was there before is not followed."""
    names, rows = ["a", "b"], StepRows()
    batch = SimpleNamespace(outputs=[Counted(request_id=n, new_token_ids=[7], finish_reason=None) for n in names])
    rows.told(names, (batch,), {"a": 1, "b": 2})

    assert rows.told(names, (batch,), {"c": 1, "d": 2})[0] == [("a", 1, False), ("b", 1, False)]


def test_a_request_that_ends_never_makes_the_hook_look_at_all_others_by_name():
    outputs = [SimpleNamespace(request_id=name, new_token_ids=[7], finish_reason=None) for name in "abc"]
    outputs[0].finish_reason = "length"
    batch = SimpleNamespace(outputs=outputs)

    assert StepRows().told("abc", (batch,), set("abc")) == ([("a", 1, True)], 2, ())
    assert StepRows().told("abcd", (batch,), set("abcd"))[2] == set("abc")  # one of them got nothing: who is it?

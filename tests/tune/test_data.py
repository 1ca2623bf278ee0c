"""From jsonl to micro-batches: what is learnt from, what is refused, and that it is the same at every start."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from valve_tune.train import lines as lines_of
from valve_tune.train.batch import IGNORED, PADDING
from valve_tune.train.data import load
from valve_tune.train.lines import DataError
from valve_tune.train.packing import best_fit
from valve_tune.train.spec import JobSpec

USER, ASSISTANT = {"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}


@pytest.fixture
def make(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')

    def made(lines, template=tiny.TEMPLATE, **fields):
        data = tmp_path / "train.jsonl"
        body = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines]
        data.write_bytes(b"\n".join(body))
        values = {"max_steps": 1, "max_length": 32, **fields}
        spec = JobSpec(model=str(tmp_path), data=str(data), out=str(tmp_path / "out"), **values)
        return load(spec, tiny.tokenizer(template))

    return made


def learnt(batch) -> str:
    return tiny.tokenizer().decode(batch.labels[batch.labels != IGNORED])


@pytest.mark.parametrize("template", [tiny.TEMPLATE, tiny.MARKED], ids=["difference", "marks"])
def test_only_what_the_assistant_says_is_learnt(make, template):
    more = {"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}
    (batch,) = make([{"messages": [USER, ASSISTANT, *more]}], template).step(0)
    assert learnt(batch) == "w3 w4 <|end|> w6 <|end|>"


def test_loss_on_everything_when_asked(make):
    (batch,) = make([{"messages": [USER, ASSISTANT]}], assistant_only_loss=False).step(0)
    assert batch.label_count == batch.tokens - 1


def test_a_template_that_rewrites_earlier_turns_is_refused_and_never_learnt_wrongly(make):
    with pytest.raises(DataError, match=r"line 1, messages\[1\]: .*generation"):
        make([{"messages": [USER, ASSISTANT, USER, ASSISTANT]}], tiny.FORGETFUL)
    (batch,) = make([{"messages": [USER, ASSISTANT]}], tiny.FORGETFUL).step(0)
    assert learnt(batch) == "w3 w4 <|end|>"


def test_a_missing_chat_template_is_said_once_and_never_for_each_line(make):
    with pytest.raises(DataError, match=r"^[^\n]*line 1, messages: the tokenizer has no chat template[^\n]*$"):
        make([{"messages": [USER, ASSISTANT]}] * 3, None)


def test_an_error_of_json_never_names_a_line_of_its_own(make):
    with pytest.raises(DataError, match=r"line 2, JSON: Expecting value at character 15$"):
        make([{"text": "w1 w2"}, b'{"messages": ['])


@pytest.mark.parametrize("template", [tiny.TEMPLATE, tiny.MARKED], ids=["difference", "marks"])
def test_prompt_and_completion(make, template):
    lines = [{"prompt": "w1 w2 ", "completion": "w3"}, {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]}]
    rows = make(lines, template, packing=False, per_device_train_batch_size=2)
    (batch,) = rows.step(0)
    said = sorted(tiny.tokenizer().decode(row[row != IGNORED]) for row in batch.labels)
    assert said == ["w3 <|end|>", "w3 w4 <|end|>"]


@pytest.mark.parametrize("template", [tiny.TEMPLATE, tiny.MARKED], ids=["difference", "marks"])
def test_what_a_file_says_not_to_learn_is_never_learnt(make, template):
    """OpenAI's files weigh the assistant's messages 0 or 1."""
    wrong = {"role": "assistant", "content": "w9", "weight": 0}
    (batch,) = make([{"messages": [USER, wrong, USER, ASSISTANT | {"weight": 1}]}], template).step(0)
    assert learnt(batch) == "w3 w4 <|end|>"
    with pytest.raises(DataError, match="line 1, messages: no message of the assistant"):
        make([{"messages": [USER, wrong]}], template)
    with pytest.raises(DataError, match="line 1, weight: is 0 at a message"):
        make([{"messages": [USER, wrong, ASSISTANT]}], template, assistant_only_loss=False)


def test_a_turn_of_a_prompt_that_the_template_rewrites_later_is_never_learnt(make):
    """The marks are counted: where the prompt stands in the whole text says nothing if it is written anew there."""
    forgetful = tiny.MARKED.replace("{{ message['content'] }} <|end|> {% endgen", "{{ last }} <|end|> {% endgen")
    forgetful = forgetful.replace(
        "{% generation", "{% set last = message['content'] if loop.last else 'x' %}{% generation"
    )
    (batch,) = make([{"prompt": [USER, ASSISTANT], "completion": [USER, ASSISTANT]}], forgetful).step(0)
    assert learnt(batch) == "w3 w4 <|end|>"


def test_marks_that_belong_to_no_known_message_are_refused_where_not_all_are_learnt(make):
    twice = tiny.MARKED.replace("{% endgeneration %}", "{% endgeneration %}{% generation %}w0 {% endgeneration %}")
    with pytest.raises(DataError, match=r"makes 4 marks \{% generation %\} for 2 messages"):
        make([{"messages": [USER, ASSISTANT | {"weight": 0}, USER, ASSISTANT]}], twice)
    (batch,) = make([{"messages": [USER, ASSISTANT]}], twice).step(0)
    assert learnt(batch) == "w3 w4 <|end|> w0"


def test_arguments_of_a_tool_are_never_learnt_inside_quotes(make):
    """vLLM and SGLang make an object of them before the template writes them; files of OpenAI's shape have text."""
    written = "{{ message.tool_calls[0].function.arguments.said if message.tool_calls else message['content'] }}"
    template = tiny.TEMPLATE.replace("{{ message['content'] }}", written)
    for arguments in ('{"said": "w8"}', {"said": "w8"}):
        calls = [{"type": "function", "function": {"name": "w7", "arguments": arguments}}]
        called = {"role": "assistant", "content": None, "tool_calls": calls}
        (batch,) = make([{"messages": [USER, called]}], template).step(0)
        assert learnt(batch) == "w8 <|end|>"


@pytest.mark.parametrize(
    "function", [{"name": "w7"}, {"name": "w7", "arguments": None}, {"name": "w7", "arguments": ""}]
)
def test_a_tool_without_arguments_is_never_learnt_as_null(make, function):
    """An engine hands the template an object there, too."""
    written = (
        "{% if message.tool_calls and message.tool_calls[0].function.arguments is mapping %}w8{% else %}w9{% endif %}"
    )
    called = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    (batch,) = make([{"messages": [USER, called]}], tiny.TEMPLATE.replace("{{ message['content'] }}", written)).step(0)
    assert learnt(batch) == "w8 <|end|>"


def test_text_and_tokens(make):
    (batch,) = make([{"text": "w1 w2 w3"}]).step(0)
    assert learnt(batch) == "w2 w3 <|end|>"
    (batch,) = make([{"input_ids": [6, 7, 8], "labels": [-100, 7, -100]}]).step(0)
    assert batch.labels.tolist() == [[IGNORED, 7, IGNORED]]


BAD = {
    b"{": "JSON",
    b'{"messages": "x"}': "messages",
    b'{"messages": []}': "messages",
    b'{"messages": [{"role": "boss", "content": "w1"}]}': r"messages\[0\].role",
    b'{"messages": [{"role": "user", "content": 3}]}': r"messages\[0\].content",
    b'{"messages": [{"role": "user", "content": "w1"}]}': "messages",
    b'{"messages": [{"role": "assistant", "content": "w1", "weight": 0.5}]}': r"messages\[0\].weight",
    b'{"messages": [{"role": "assistant", "content": "w1", "weight": true}]}': r"messages\[0\].weight",
    b'{"messages": [{"role": "user", "content": "w1", "weight": 1}]}': r"messages\[0\].weight",
    b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}': r"messages\[0\].tool_calls\[0\]",
    b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "x"}}]}]}': (
        r"messages\[0\].tool_calls\[0\].arguments"
    ),
    b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": [7]}}]}]}': (
        r"messages\[0\].tool_calls\[0\].arguments"
    ),
    b'{"prompt": "w1"}': "completion",
    b'{"prompt": "w1", "completion": ""}': "completion",
    b'{"text": ""}': "text",
    b'{"input_ids": [1, 64]}': "input_ids",
    b'{"input_ids": [1, -1]}': "input_ids",
    b'{"input_ids": [1, true]}': r"input_ids\[1\]",
    b'{"input_ids": [1, 2], "labels": [1]}': "labels",
    b'{"input_ids": [1, 2], "labels": [1, 99]}': "labels",
    b'{"question": "w1"}': "fields",
    b"[1]": "JSON",
    b'{"text": "\xff"}': "encoding",
    b"[" * 100_000: "JSON",
}


@pytest.mark.parametrize("line", list(BAD), ids=range(len(BAD)))
def test_a_bad_line_is_named_by_number_and_field_before_anything_runs(make, line):
    with pytest.raises(DataError, match=f"line 3, {BAD[line]}: ") as error:
        make([{"text": "w1 w2"}, b"", line, {"text": "w1 w2"}])
    assert [each.line for each in error.value.lines] == [3]


def test_all_bad_lines_are_named_at_once_and_many_are_counted(make):
    with pytest.raises(DataError, match="and 5 more bad lines") as error:
        make([b"{"] * 25)
    assert len(error.value.lines) == 25


def test_nothing_to_read_and_nothing_to_learn_are_clear_ends(make, tmp_path):
    with pytest.raises(DataError, match="is empty"):
        make([])
    with pytest.raises(DataError, match="anything to learn within 2 tokens"):
        make([{"messages": [USER, ASSISTANT]}], max_length=2)
    spec = JobSpec(model=str(tmp_path), data=str(tmp_path / "none"), out="o", max_steps=1)
    with pytest.raises(DataError, match="cannot be read"):
        load(spec, tiny.tokenizer())
    with pytest.raises(DataError, match="no base model"):
        load(JobSpec(model=str(tmp_path / "none"), data="d", out="o", max_steps=1), tiny.tokenizer())


def test_a_token_that_spans_prompt_and_completion_is_never_left_out_in_silence(make):
    rows = make([{"prompt": "w1 w", "completion": "2 w3"}, {"prompt": "w1 ", "completion": "w2"}], packing=False)
    assert [note.partition(",")[0] for note in rows.notes] == ["1 examples have a token of both prompt and completion"]
    assert make([{"prompt": "w1", "completion": " w2"}]).notes == ()


def test_what_is_cut_is_said(make):
    rows = make([{"text": " ".join(["w1"] * 50)}, {"text": "w1 w2"}])
    assert rows.notes == ("1 examples have more than 32 tokens and were cut",)
    assert max(batch.input_ids.shape[1] for batch in rows.step(0)) <= 32


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 90))
def test_packing_loses_nothing_and_overfills_no_row(lengths, capacity):
    rows = best_fit(lengths, capacity)
    assert sorted(each for row in rows for each in row) == list(range(len(lengths)))
    fill = [sum(lengths[each] for each in row) for row in rows]
    assert all(each <= capacity for each in fill)
    assert sum(each * 2 <= capacity for each in fill) <= 1  # two such rows would have been one


def test_packed_rows_keep_their_examples_apart(make):
    lines = [{"input_ids": [6 + number] * (3 + number % 4)} for number in range(12)]
    rows = make(lines, per_device_train_batch_size=2)
    for step in range(rows.steps_per_pass):
        for batch in rows.step(step):
            for ids, labels, segments, positions in zip(*batch.arrays().values(), strict=True):
                for segment in range(1, segments.max() + 1):
                    own = segments == segment
                    assert len(set(ids[own])) == 1
                    assert positions[own].tolist() == list(range(own.sum()))
                    assert labels[own][0] == IGNORED
                assert (labels[segments == PADDING] == IGNORED).all()


def test_rows_are_whole_spans(make):
    rows = make([{"input_ids": [6] * 5}], span=8)
    assert rows.step(0)[0].input_ids.shape == (1, 8)


def test_the_same_job_gets_the_same_batches_at_every_start_and_another_seed_others(make):
    lines = [{"input_ids": [6 + number] * 20} for number in range(16)]

    def steps(rows, which):
        return [np.concatenate([each.input_ids.ravel() for each in rows.step(step)]).tolist() for step in which]

    fields = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
    whole = steps(make(lines, **fields), range(9))
    assert steps(make(lines, **fields), [8, 3, 4]) == [whole[8], whole[3], whole[4]]  # resumed anywhere
    assert steps(make(lines, seed=1, **fields), range(9)) != whole
    assert make(lines).digest == make(lines).digest != make(lines[1:]).digest


def test_each_pass_sees_every_row_once(make):
    rows = make([{"input_ids": [6 + number] * 20} for number in range(12)], per_device_train_batch_size=4)
    for turn in range(3):
        seen = [ids[0] for step in range(3) for batch in rows.step(3 * turn + step) for ids in batch.input_ids]
        assert sorted(seen) == list(range(6, 18))


def test_bad_lines_never_fill_the_memory_and_each_is_counted(make):
    with pytest.raises(DataError, match="and 4980 more bad lines") as error:
        make([b"x"] * 5000)
    assert len(error.value.lines) == 1000
    assert error.value.count == 5000


def test_a_line_is_never_read_beyond_the_limit_and_the_next_keeps_its_number(make, monkeypatch):
    monkeypatch.setattr(lines_of, "LONGEST_LINE", 64)
    with pytest.raises(DataError) as error:
        make([{"text": "w1"}, b"x" * 1000, b'{"text": "w1"' + b" " * 49 + b"}", {"text": 3}])
    assert [(each.line, each.field) for each in error.value.lines] == [(2, "length"), (4, "text")]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ({"text": "\ud800"}, "text"),
        ({"prompt": "w1", "completion": "w2 \udfff"}, "completion"),
        ({"messages": [USER, {**ASSISTANT, "content": "\udc00\ud83d"}]}, r"messages\[1\].content"),
        ({"messages": [USER, ASSISTANT], "tools": [{"name": "\ud800"}]}, r"tools\[0\].name"),
    ],
)
def test_half_a_surrogate_pair_is_refused_and_never_a_traceback(make, line, field):
    with pytest.raises(DataError, match=f"line 2, {field}: holds half of a surrogate pair"):
        make([{"text": "w1 \U0001f600"}, line])

"""Trace input: what is read, what is skipped, what is refused and with which words."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from valve_tools.sim import traces
from valve_tools.sim.pairs import batch_lengths
from valve_tools.sim.traces import NS, JobLengths, Trace, TraceError, largest, lengths_in, read_file, read_folder

GOOD = "t_s,in_tok,out_tok\n0.5,10,3\n1.25,20,1\n"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_a_plain_and_a_compressed_trace_read_alike(tmp_path):
    plain = read_file(write(tmp_path, "a.csv", GOOD))
    packed = read_file(write(tmp_path, "b.csv.gz", GOOD))

    assert isinstance(plain, Trace)
    assert isinstance(packed, Trace)
    assert [NS // 2, NS + NS // 4] == plain.arrive_ns.tolist() == packed.arrive_ns.tolist()
    assert plain.in_tok.tolist() == [10, 20]
    assert plain.out_tok.tolist() == [3, 1]


def test_further_columns_and_their_order_do_not_matter(tmp_path):
    found = read_file(write(tmp_path, "a.csv", "reuse,out_tok,t_s,in_tok\n7,3,0.5,10\n"))

    assert isinstance(found, Trace)
    assert (found.in_tok[0], found.out_tok[0]) == (10, 3)


def test_a_row_with_a_blank_cell_is_a_missing_sample(tmp_path):
    found = read_file(write(tmp_path, "a.csv", "t_s,in_tok,out_tok\n0,1,1\n1,,2\n2,3,3\n"))

    assert isinstance(found, Trace)
    assert (found.requests, found.skipped) == (2, 1)


@pytest.mark.parametrize(
    ("first", "then", "read"),
    [
        (1_700_000_000, 1_700_000_060, [0, 60]),
        (2_100, 3_600, [0, 1_500]),
        (500, 501, [500, 501]),
        (4_000, 21_600, [4_000, 21_600]),
    ],
)
def test_times_since_1970_or_of_a_longer_trace_count_from_the_first_request(tmp_path, first, then, read):
    """Idle time at the start of a slice stays: below a quarter of the slice, or ten minutes."""
    found = read_file(write(tmp_path, "a.csv", f"t_s,in_tok,out_tok\n{first},1,1\n{then},1,1\n"))

    assert isinstance(found, Trace)
    assert found.arrive_ns.tolist() == [one * NS for one in read]


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path):
    assert isinstance(read_file(write(tmp_path, "a.csv", "\ufeff" + GOOD)), Trace)


def test_lengths_without_times_are_a_batch_job(tmp_path):
    found = read_file(write(tmp_path, "a.csv", "in_tok,out_tok\n100,5\n"))

    assert isinstance(found, JobLengths)
    assert found.in_tok.tolist() == [100]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("x,1,1", "t_s is 'x', not a number"),
        ("1.7e12,1,1", "milliseconds"),
        ("1,1.5,1", "in_tok is 1.5, it must be a whole number"),
        ("1,0,1", "in_tok is 0, it must be a whole number"),
        ("1,1,-4", "out_tok is -4, it must be finite and not negative"),
        ("nan,1,1", "t_s is nan, it must be finite"),
        ("0.2,1,1", "t_s 0.2 is before the row above"),
        ("1,1", "2 cells where the header has 3"),
    ],
)
def test_a_malformed_row_is_refused_with_file_and_line(tmp_path, row, words):
    path = write(tmp_path, "bad.csv", f"t_s,in_tok,out_tok\n0.5,1,1\n{row}\n")

    with pytest.raises(TraceError) as refused:
        read_file(path)

    assert str(refused.value).startswith(f"{path}:3: ")
    assert words in str(refused.value)


def test_a_truncated_archive_is_refused_by_name(tmp_path):
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(gzip.compress((GOOD * 50).encode())[:40])

    with pytest.raises(TraceError, match=r"cut\.csv\.gz: unreadable"):
        read_file(path)


def test_a_folder_keeps_traces_and_lengths_and_names_what_it_ignored(tmp_path):
    write(tmp_path, "one.csv", GOOD)
    write(tmp_path, "lengths.csv", "in_tok,out_tok\n1,1\n")
    write(tmp_path, "rates.csv", "t,client,rate\n0,1,2\n")
    write(tmp_path, "README.md", "words")

    folder = read_folder(tmp_path)

    assert [trace.name for trace in folder.traces] == ["one"]
    assert [one.name for one in folder.lengths] == ["lengths"]
    assert folder.ignored == ("README.md", "rates.csv")


def test_a_folder_without_a_request_trace_is_refused(tmp_path):
    write(tmp_path, "rates.csv", "t,client,rate\n0,1,2\n")

    with pytest.raises(TraceError, match="holds no request trace"):
        read_folder(tmp_path)


def test_thinning_keeps_every_kth_request(tmp_path):
    found = read_file(write(tmp_path, "a.csv", "t_s,in_tok,out_tok\n" + "".join(f"{i},{i + 1},1\n" for i in range(6))))

    assert isinstance(found, Trace)
    assert found.thinned(3).in_tok.tolist() == [1, 4]
    assert found.thinned(3).label == "a/3"


def test_what_cannot_be_read_as_far_as_its_header_is_no_trace_and_is_named(tmp_path):
    write(tmp_path, "one.csv", GOOD)
    (tmp_path / "latin.csv").write_bytes("Größe,Übergang\n1,ä\n".encode("latin-1"))
    (tmp_path / "notes.csv.gz").write_text("no archive")
    (tmp_path / "packed.csv").write_bytes(gzip.compress(GOOD.encode()))

    folder = read_folder(tmp_path)

    assert [trace.name for trace in folder.traces] == ["one"]
    assert folder.ignored == ("latin.csv", "notes.csv.gz", "packed.csv")


def test_bytes_that_are_no_text_are_refused_where_a_value_is_wanted(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"t_s,in_tok,out_tok,note\n0,1,1,\xe4\n1,\xe4,1,x\n")

    with pytest.raises(TraceError, match=r"a\.csv:3: in_tok is "):
        read_file(path)


def test_the_line_of_a_record_is_counted_in_lines_not_in_records(tmp_path):
    path = write(tmp_path, "a.csv", 't_s,in_tok,out_tok,note\n0,1,1,"two\nlines"\n\n1,x,1,y\n')

    with pytest.raises(TraceError, match=r"a\.csv:5: in_tok is 'x'"):
        read_file(path)


def test_lengths_may_come_in_any_order_and_the_largest_file_is_everyones(tmp_path):
    write(tmp_path, "a.csv", "in_tok,out_tok\n1,1\n")
    write(tmp_path, "b.csv", "out_tok,in_tok\n5,100\n,7\n6,200\n")
    write(tmp_path, "c.csv", GOOD)

    folder = read_folder(tmp_path)

    assert folder.skipped == 1
    for found in (largest(folder.lengths), largest(lengths_in(tmp_path)), batch_lengths(folder)):
        assert (found.in_tok.tolist(), found.out_tok.tolist()) == ([100, 200], [5, 6])


CELL = st.one_of(
    st.integers(0, 2_000).map(str),
    st.floats(0, 4e9).map(repr),
    st.sampled_from(["", " ", "7 ", "1_0", "0x1", "1e3", "-1", "nan", "inf", "1.5", "x", '"3"', "3#", "\u0663", "\0"]),
)
LINE = st.lists(CELL, min_size=1, max_size=5).map(",".join)


def reading(path: Path) -> object:
    try:
        found = read_file(path)
    except TraceError as error:
        return str(error)
    return (found.skipped, *(each.tolist() for each in (found.arrive_ns, found.in_tok, found.out_tok)))


@given(st.lists(LINE, max_size=6), st.sampled_from(["\n", "\r\n", "\r", "\n\n"]), st.booleans())
@example(["0,1,1,a", "1,2,2,b"], "\n", True)
@example(["0,1,1,a", "1,2,2", "2,3,3,b,c"], "\n", True)
@example(["4294967295.123456789,1,1,"], "\r\n", False)
def test_what_is_read_at_once_is_never_read_otherwise_line_by_line(tmp_path_factory, rows, end, is_ended):
    path = tmp_path_factory.mktemp("rows") / "a.csv"
    text = end.join(["t_s,in_tok,out_tok,note", *rows]) + end * is_ended
    path.write_bytes(text.encode())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "_plain_rows", lambda *given: None)
        one_by_one = reading(path)

    assert reading(path) == one_by_one


def test_a_plain_file_is_never_read_line_by_line(tmp_path, monkeypatch):
    """A week of a hundred services is 14 million rows."""
    monkeypatch.setattr(traces, "_value", lambda *given: pytest.fail("a value was looked at by itself"))
    rows = "".join(f"{i / 8},{i + 1},1,word\n" for i in range(100))
    path = write(tmp_path, "a.csv.gz", "t_s,in_tok,out_tok,note\n" + rows)

    found = read_file(path)

    assert isinstance(found, Trace)
    assert found.requests == 100

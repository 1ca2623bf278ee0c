"""A state file that is none: set aside and named, and never a reason not to start."""

from __future__ import annotations

import pytest
from node_world import World

from valved.state import saved as state


@pytest.fixture
def first(tmp_path):
    return World(tmp_path)


def set_aside(path, data):
    path.write_bytes(data)
    saved, problem = state.load(path)
    return saved is None and "set aside" in problem and path.with_name("state.json.bad").read_bytes() == data


def test_a_state_file_that_is_cut_at_any_byte_is_set_aside_and_named(first):
    first.offline()
    first.online()
    first.handover.save()
    path = first.folder / "state.json"
    data = path.read_bytes()

    assert [end for end in range(len(data)) if not set_aside(path, data[:end])] == []


@pytest.mark.parametrize("data", [b"", b"\0" * 4096, b"\xff", b"[]", b'{"more": ' + b"[" * 100_000])
def test_a_state_file_that_is_none_never_keeps_valved_from_starting(tmp_path, data):
    assert set_aside(tmp_path / "state.json", data)

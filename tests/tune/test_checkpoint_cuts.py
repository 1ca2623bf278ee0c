"""A checkpoint that is cut at any byte, grown, or whose manifest says nothing is never taken for whole."""

from __future__ import annotations

import pytest
from valve_tune.train import checkpoint

FILES = {"adapter_model.safetensors": b"A" * 37, "cursor.json": b'{"step": 3}', "optimizer.safetensors": b"M" * 23}


@pytest.fixture
def out(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, FILES, 5)
    assert checkpoint.newest(tmp_path) == (tmp_path / "checkpoint-2", [])
    return tmp_path


@pytest.mark.parametrize("name", [*FILES, checkpoint.MANIFEST])
def test_a_file_that_is_cut_at_any_byte_never_counts(out, name):
    path = out / "checkpoint-2" / name
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        found, faults = checkpoint.newest(out)
        assert (found, len(faults)) == (out / "checkpoint-1", 1), cut
    path.unlink()
    assert checkpoint.newest(out)[0] == out / "checkpoint-1"
    path.write_bytes(whole)
    assert checkpoint.newest(out)[0] == out / "checkpoint-2"


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_has_grown_never_counts(out, name):
    path = out / "checkpoint-2" / name
    path.write_bytes(path.read_bytes() + b"\x00")
    assert checkpoint.newest(out)[0] == out / "checkpoint-1"


@pytest.mark.parametrize("said", [b"{}", b"[]", b"null", b"\xff", b'{"cursor.json": null}', b"[" * 100_000])
def test_a_manifest_that_names_no_checksum_never_makes_a_checkpoint_whole(out, said):
    """`{}` was whole without a file; a deep one ended the job in a traceback."""
    (out / "checkpoint-2" / checkpoint.MANIFEST).write_bytes(said)
    assert checkpoint.newest(out)[0] == out / "checkpoint-1"

"""What a Kubernetes node keeps in files is there, also where there is no descriptor to read it with."""

from __future__ import annotations

import pytest
from scarce import left

from valved.kube import seriesfile


def test_the_history_of_a_node_is_never_given_up_for_want_of_a_descriptor(tmp_path):
    path = tmp_path / "series.npz"
    path.write_bytes(b"a history")

    with left(0), pytest.raises(OSError, match="Too many open files"):
        seriesfile.read(path, None, "boot", [], 0.0)

    assert seriesfile.read(tmp_path / "none.npz", None, "boot", [], 0.0) == "there is none"

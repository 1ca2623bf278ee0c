"""What a Kubernetes node keeps in files is there, also where there is no descriptor to read it with."""

from __future__ import annotations

import errno

import pytest
from scarce import left

from valved.fds import names_in, read_if_there
from valved.kube import cdi, seriesfile, shimfiles
from valved.kube.starter import MayNotStart, Starter


def test_the_history_of_a_node_is_never_given_up_for_want_of_a_descriptor(tmp_path):
    path = tmp_path / "series.npz"
    path.write_bytes(b"a history")

    with left(0), pytest.raises(OSError, match="Too many open files"):
        seriesfile.read(path, None, "boot", [], 0.0)

    assert seriesfile.read(tmp_path / "none.npz", None, "boot", [], 0.0) == "there is none"


def test_a_description_of_the_toolkit_is_never_taken_for_none_for_want_of_a_descriptor(tmp_path):
    (tmp_path / "a.json").write_text('{"kind": "another.com/gpu"}')
    (tmp_path / "nvidia.yaml").write_text("kind: nvidia.com/gpu\ndevices: []\n")
    (tmp_path / "broken.yaml").write_bytes(b"\xff\xfe kind: [")
    folders = [tmp_path / "none", tmp_path]
    assert cdi.read_toolkit(folders) == {"kind": "nvidia.com/gpu", "devices": []}

    with left(0), pytest.raises(OSError, match="Too many open files"):
        cdi.read_toolkit(folders)
    assert cdi.read_toolkit([tmp_path / "none"]) is None


def test_one_description_that_cannot_be_read_never_hides_that_of_the_toolkit(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "nvidia.yaml").write_text("kind: nvidia.com/gpu\n")
    read = cdi.read_if_there
    monkeypatch.setattr(cdi, "read_if_there", lambda path: read(path) if path.name != "a.json" else refused())

    assert cdi.read_toolkit([tmp_path]) == {"kind": "nvidia.com/gpu"}
    (tmp_path / "nvidia.yaml").unlink()
    with pytest.raises(OSError, match="Input/output"):
        cdi.read_toolkit([tmp_path])


def test_a_container_never_starts_without_its_gpus_because_a_description_could_not_be_read(tmp_path):
    (tmp_path / "nvidia.yaml").write_text("kind: nvidia.com/gpu\ndevices: []\n")
    starter = Starter.__new__(Starter)
    starter.toolkit_folders = [tmp_path]

    with left(0), pytest.raises(MayNotStart, match="Too many open files"):
        starter._describe(tmp_path, ("0",), ("GPU-1",))


def test_no_library_that_a_process_maps_is_removed_because_the_processes_could_not_be_listed(tmp_path, monkeypatch):
    shims, processes = tmp_path / "shim", tmp_path / "proc"
    (shims / "1-old").mkdir(parents=True)
    (processes / "7").mkdir(parents=True)
    (processes / "7" / "maps").write_text("/shim/1-old/libvalve.so\n")
    assert shimfiles.remove_unused(shims, processes) == []
    monkeypatch.setattr(shimfiles, "names_in", lambda folder: refused())

    assert shimfiles.remove_unused(shims, processes) == []
    assert (shims / "1-old").is_dir()


def test_only_what_is_not_there_is_ever_taken_for_absent(tmp_path):
    assert read_if_there(tmp_path / "none") is None
    assert names_in(tmp_path / "none") == []
    (tmp_path / "file").touch()
    assert read_if_there(tmp_path / "file" / "below") is None
    for refuse in (lambda: read_if_there(tmp_path), lambda: names_in(tmp_path / ("x" * 300))):
        with pytest.raises(OSError, match=r"this is no file|File name too long"):
            refuse()


def refused():
    raise OSError(errno.EIO, "Input/output error")

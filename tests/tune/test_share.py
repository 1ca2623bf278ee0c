"""The weights of a service: one copy in memory, mapped with its owner's consent alone, and no longer than that."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from transformers import AutoModelForCausalLM
from valve_tune.base.consent import NotShared, Owners, find
from valve_tune.base.shared import SharedFile, adopt, publish
from valve_tune.base.weights import BadBase
from valve_tune.serve.cli import main
from valve_tune.serve.folder import FolderError, JobFolder
from valve_tune.serve.publish import check_base
from valve_tune.train.build import open_model
from valve_tune.train.guard import BEGUN, Guard
from valve_tune.train.report import Answer, End


class Valved:
    """The file that valved writes (valved/clients/sharing.py)."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        monkeypatch.setenv("VALVE_RUN_DIR", str(folder))
        self._path = folder / "weights.json"
        self.pid = os.getpid()
        self.start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])

    def says(self, *shares: bool, start: int | None = None) -> None:
        one = {"name": "chat", "processes": [[self.pid, self.start if start is None else start]]}
        services = [{**one, "id": 7 + number, "shares": each} for number, each in enumerate(shares)]
        fresh = self._path.with_name("fresh")
        fresh.write_text(json.dumps({"services": services}))
        fresh.replace(self._path)


@pytest.fixture
def valved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Valved:
    return Valved(tmp_path / "run", monkeypatch)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return jobs.model_folder(tmp_path / "base")


@pytest.fixture
def served(tmp_path: Path, base: Path) -> Path:
    """A file that this process maps, as a service would."""
    path = tmp_path / "weights"
    main(["share", "--model", str(base), "--to", str(path)])
    return path


def mapped_kib(pid: int | str, path: Path) -> dict[str, int]:
    """Of the file, in one process: Rss, Pss, Private_Dirty and so on, summed."""
    found: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith("kB") and " " not in name:
            if inside:
                found[name] = found.get(name, 0) + int(rest.split()[0])
        elif "VmFlags" not in line and "THPeligible" not in line:
            inside = line.endswith(str(path))
    return found


def test_a_service_and_its_trainer_hold_one_copy_in_memory(base: Path, served: Path) -> None:
    argv = [sys.executable, str(Path(__file__).with_name("shared_service.py")), str(base), str(served)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdin is not None
        assert service.stdout is not None
        assert service.stdout.readline() == "shared\n"
        ours = SharedFile(served)
        here, there = mapped_kib("self", served), mapped_kib(service.pid, served)
        service.stdin.close()
    size = -(-served.stat().st_size // 4096) * 4
    assert here["Rss"]
    assert there["Rss"]
    assert here["Pss"] + there["Pss"] <= size + 2, "it is there more than once"
    assert not here["Private_Dirty"] + there["Private_Dirty"]
    ours.check()


def test_a_model_of_another_base_is_never_given_half_of_the_weights(base: Path, served: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        other.model.norm.weight[0] += 1
    before = {name: each.clone() for name, each in other.named_parameters()}
    with pytest.raises(BadBase, match="holds no"):
        adopt(other, served)
    assert all(torch.equal(each, before[name]) for name, each in other.named_parameters())


def test_nobody_else_may_open_the_file(served: Path) -> None:
    assert served.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("by_file", [False, True])
def test_the_weights_of_a_service_without_consent_are_refused_by_name(
    valved: Valved, served: Path, by_file: bool
) -> None:
    valved.says(False)
    mapping = SharedFile(served)
    with pytest.raises(NotShared, match=r"share_weights: service 7 \(chat\) does not consent"):
        find(str(served) if by_file else "chat")
    valved.says(True)
    assert find(str(served) if by_file else "7")[0] == served
    mapping.check()


@pytest.mark.parametrize("how", ["torn", "missing"])
def test_a_file_whose_owner_valved_does_not_say_is_never_mapped(valved: Valved, served: Path, how: str) -> None:
    valved.says(False)
    mapping = SharedFile(served)
    said = Path(os.environ["VALVE_RUN_DIR"], "weights.json")
    if how == "torn":
        said.write_text('{"services": [{"id"')
    else:
        said.unlink()
        said.with_name("link.sock").touch()
    with pytest.raises(NotShared, match="the owner of the weights is unknown"):
        find(str(served))
    mapping.check()


def test_a_file_is_free_where_no_valved_is(valved: Valved, served: Path) -> None:
    path, permit = find(str(served))
    assert path == served
    permit.check()


@pytest.mark.parametrize("then", ["it is mapped", "valved is silent"])
def test_a_permit_by_file_never_outlives_a_refusal_that_came_later(
    valved: Valved, served: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr("valve_tune.base.consent.LOOK_S", 0.0, raising=False)
    valved.says(False)
    _, permit = find(str(served))
    permit.check()
    mapping = SharedFile(served) if then == "it is mapped" else None
    if mapping is None:
        Path(os.environ["VALVE_RUN_DIR"], "weights.json").write_text("{")
    with pytest.raises(NotShared, match="does not consent" if mapping else "the owner of the weights is unknown"):
        permit.check()


def test_a_service_that_nobody_knows_or_two_of_one_name_are_never_guessed(valved: Valved) -> None:
    with pytest.raises(NotShared, match="no online service of that name shares"):
        find("chat")
    valved.says(True, True)
    with pytest.raises(NotShared, match="give the number"):
        find("chat")


def test_a_process_that_got_the_number_of_a_dead_service_is_never_taken_for_it(valved: Valved, served: Path) -> None:
    mapping = SharedFile(served)
    valved.says(True, start=valved.start + 1)
    with pytest.raises(NotShared, match="maps no file"):
        find("chat")
    mapping.check()


@pytest.mark.parametrize("how", ["false", "gone", "no file"])
def test_a_consent_that_is_taken_back_ends_the_job_at_the_next_tile_and_costs_no_byte(
    valved: Valved, base: Path, served: Path, tmp_path: Path, how: str
) -> None:
    right = jobs.finished(jobs.job(base, tmp_path / "own"))
    mapping = SharedFile(served)
    valved.says(True)
    at, out = 40, tmp_path / "out"

    def withdraw() -> Answer:
        if how == "no file":
            (tmp_path / "run" / "weights.json").unlink()
        else:
            valved.says(*([False] if how == "false" else []))
        return Answer.GO

    control = jobs.At(at, withdraw)
    outcome = jobs.train(jobs.job(base, out, share_weights="chat"), control)
    assert (outcome.end, control.asked) == (End.FAILED, at)
    assert "service 7 (chat) does not consent" in outcome.message
    assert outcome.checkpoint is not None
    assert jobs.finished(jobs.job(base, out)) == right
    mapping.check()


def test_an_adapter_is_never_published_after_the_weights_it_was_trained_on_changed(
    base: Path, served: Path, tmp_path: Path
) -> None:
    folder, spec = JobFolder(tmp_path / "out"), jobs.job(base, tmp_path / "out", share_weights=str(served))
    with folder.claimed(spec):
        check_base(folder)
        with served.open("r+b") as file:
            file.seek(-64, os.SEEK_END)
            file.write(b"\1" * 64)
        with pytest.raises(FolderError, match="not published"):
            check_base(folder)


def test_a_part_of_a_fleet_job_is_never_published_for_another_base_at_the_same_path(
    base: Path, served: Path, tmp_path: Path
) -> None:
    """It has no checkpoint that says what it was trained on; the guard has written it down."""
    spec = jobs.job(base, tmp_path / "out", share_weights=str(served), max_steps=1)
    folder = JobFolder(spec.out)
    with folder.claimed(spec, fleet="chat"):
        (folder.path / BEGUN).write_text(open_model(spec).weights.digest + "\n")
        check_base(folder)
        publish({name: each + 1 for name, each in SharedFile(served).tensors.items()}, served)
        with pytest.raises(FolderError, match="not published"):
            check_base(folder)


def test_a_checksum_that_was_written_late_never_publishes_an_adapter_for_another_base(
    base: Path, served: Path, tmp_path: Path
) -> None:
    """An earlier Valve left the file empty, and the base changed before the next start filled it."""
    spec = jobs.job(base, tmp_path / "out", share_weights=str(served))
    folder = JobFolder(spec.out)
    with folder.claimed(spec):
        jobs.train(spec)
        publish({name: each + 1 for name, each in SharedFile(served).tensors.items()}, served)
        for late in ("", open_model(spec).weights.digest):
            (folder.path / BEGUN).write_text(late)
            with pytest.raises(FolderError, match="not published"):
                check_base(folder)


def test_a_kill_while_the_guard_writes_its_checksum_never_says_that_the_base_changed(
    base: Path, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier Valve could be killed between the empty file and its content; this one writes it whole."""
    spec = jobs.job(base, tmp_path / "out", share_weights=str(served))
    weights = open_model(spec).weights
    written: list[str] = []

    def torn(path: Path, content: str, *_: Any) -> None:
        written.append(path.name)
        path.touch()
        raise KeyboardInterrupt  # as a kill: nothing after it runs

    with monkeypatch.context() as killed:
        killed.setattr(Path, "write_text", torn)
        with contextlib.suppress(KeyboardInterrupt), Guard(spec, weights):
            pass
    assert written == []
    (tmp_path / "out" / BEGUN).write_text("")
    with Guard(spec, weights):
        pass
    assert (tmp_path / "out" / BEGUN).read_text().strip() == weights.digest


def test_a_base_that_does_not_fit_never_stays_in_memory(served: Path, tmp_path: Path, monkeypatch) -> None:
    home = tmp_path / "shm"
    home.mkdir()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tensors = SharedFile(served).tensors
    monkeypatch.setattr("valve_tune.base.shared.os.replace", full)
    with pytest.raises(OSError, match="No space"):
        publish(tensors, home / "llama")
    assert list(home.iterdir()) == []


def test_an_adapter_is_never_published_for_another_base_at_the_same_path(
    base: Path, served: Path, tmp_path: Path
) -> None:
    spec = jobs.job(base, tmp_path / "out", share_weights=str(served), max_steps=1)
    folder = JobFolder(spec.out)
    with folder.claimed(spec):
        jobs.finished(spec)
        check_base(folder)
        other = {name: each + 1 for name, each in SharedFile(served).tensors.items()}
        publish(other, served)
        with pytest.raises(FolderError, match="not published"):
            check_base(folder)


def test_a_file_of_valved_that_is_torn_or_strange_is_no_consent(tmp_path: Path) -> None:
    strange: list[Any] = ["", "{}", '{"services": 3}', '{"services": [{"id": 1}]}', "[]"]
    for content in strange:
        (tmp_path / "weights.json").write_text(content)
        assert Owners(tmp_path).services() is None
    one = {"id": 1, "name": "chat", "shares": "true", "processes": []}
    (tmp_path / "weights.json").write_text(json.dumps({"services": [one]}))
    assert [each.shares for each in Owners(tmp_path).services()] == [False]

"""`valve tune doctor`: what is wrong is marked and named, and the exit code says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import test_autograd
import tiny
from valve_tune.serve import doctor


def findings(model: Path) -> dict[bool, str]:
    found = list(doctor.base(str(model)))
    return {well: "; ".join(text for is_well, text in found if is_well is well) for well in (True, False)}


def test_a_base_that_can_be_trained_is_described(tmp_path: Path) -> None:
    said = findings(tiny.base(tmp_path / "llama", template=tiny.MARKED))
    assert said[False] == ""
    assert all(word in said[True] for word in ("llama: its tiles are written out", "marks what the assistant says"))
    assert "does not mark" in findings(tiny.base(tmp_path / "plain"))[True]


def test_another_family_is_trained_by_autograd_and_that_is_said(tmp_path: Path) -> None:
    test_autograd.loaded("olmo2").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    assert "olmo2: its tiles are by autograd, as model type olmo2 is not written out" in findings(tmp_path)[True]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("template", "no chat template"),
        ("tokenizer", "another model's"),
        ("no tokenizer", "has no tokenizer that loads"),
        ("config", "config.json"),
    ],
)
def test_each_fault_of_a_base_is_named_before_a_job_meets_it(tmp_path: Path, fault: str, said: str) -> None:
    model = tiny.base(tmp_path / "base", template=None if fault == "template" else tiny.TEMPLATE)
    config = model / "config.json"
    if fault == "tokenizer":
        config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 40}))
    elif fault == "no tokenizer":
        for path in model.glob("token*"):
            path.unlink()
    elif fault == "config":
        config.unlink()
    assert said in findings(model)[False]


@pytest.mark.parametrize("role", ["offline", "online", ""])
def test_training_on_a_gpu_that_nothing_stops_is_a_finding(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: "H100")
    monkeypatch.setenv("VALVE_ROLE", role)
    ((is_well, said),) = doctor.device()
    assert is_well == (role == "offline")
    assert ("valve run --offline" in said) != is_well


@pytest.mark.parametrize("package", ["torch", "transformers", "tensorboard"])
def test_a_package_that_is_not_there_is_named_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    version = doctor.importlib.metadata.version

    def missing(name: str) -> str:
        if name == package:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return version(name) if name != "tensorboard" else "1"

    monkeypatch.setattr(doctor.importlib.metadata, "version", missing)
    ((is_well, said),) = [each for each in doctor.packages() if each[1].startswith(package + " is")]
    assert is_well == (package == "tensorboard")
    assert ("make .venv-tune" in said) != is_well


def test_a_disk_without_room_and_a_home_that_cannot_be_written_are_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(doctor, "ROOM_BYTES", 1 << 60)
    assert [is_well for is_well, _ in doctor.places()] == [False, False]


def test_any_fault_is_in_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "ROOM_BYTES", 0)
    monkeypatch.setattr(doctor, "device", lambda: iter(()))
    assert doctor.command(str(tiny.base(tmp_path / "base"))) == 0
    assert doctor.command(str(tmp_path / "nothing")) == doctor.FINDINGS
    assert "FIX " in capsys.readouterr().out

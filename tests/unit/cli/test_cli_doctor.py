"""How `valve doctor` tells its findings."""

from __future__ import annotations

import argparse
import io
import os
from functools import partial

import pytest
from rich.console import Console
from valve.v1 import node_pb2

from valved.cli import doctor


def test_a_fix_of_the_doctor_is_never_broken_over_lines(monkeypatch, capsys):
    fix = "sudo install " + "-o root " * 30 + "# [quota] in /etc/valve.toml"
    found = doctor.Finding(check="a", verdict=doctor.Grade.NOTE, what="b", fix=fix)
    monkeypatch.setattr(doctor, "CHECKS", [lambda: found])
    monkeypatch.setattr(doctor, "check_cards", lambda: [])
    monkeypatch.setenv("COLUMNS", "80")
    doctor.doctor(argparse.Namespace(json=False))

    assert f"fix: {fix}\n" in capsys.readouterr().out


def test_a_lack_of_descriptors_is_never_left_out_by_the_doctor(monkeypatch):
    answer = node_pb2.Status(pid=os.getpid(), lack="valved lacks descriptors")
    monkeypatch.setattr(doctor, "ask", lambda folder: answer)

    (found,) = (one for one in doctor.check_valved() if one.what == answer.lack)

    assert found.verdict is doctor.Grade.BROKEN
    assert found.fix


LONG = "the kernel of this machine has no seal that keeps a client from writing what only valved may write, nor another"


@pytest.mark.parametrize(("columns", "is_terminal"), [(80, True), (60, True), (40, True), (80, False)])
def test_a_finding_of_the_doctor_is_never_wider_than_the_terminal_and_one_line_for_a_program(
    monkeypatch, columns, is_terminal
):
    found = doctor.Finding(check="kernel", verdict=doctor.Grade.BROKEN, what=LONG)
    out = io.StringIO()
    paper = partial(Console, file=out, width=columns, force_terminal=is_terminal, color_system=None)
    monkeypatch.setattr(doctor, "CHECKS", [lambda: found])
    monkeypatch.setattr(doctor, "check_cards", lambda: [])
    monkeypatch.setattr(doctor, "check_valved", lambda: [])
    monkeypatch.setattr(doctor, "Paper", paper)
    doctor.doctor(argparse.Namespace(json=False))

    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert " ".join(" ".join(lines).split()) == f"broken kernel: {LONG}", "nothing is lost"
    assert (max(map(len, lines)) <= columns) == is_terminal
    assert len(lines) == 1 or all(line.startswith(" " * 10) for line in lines[1:])

"""Two emulated cards whose paths meet: a folder has one card, and what is of one card never acts on another."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

from rm_process import ROOT, RmProcess
from valve_tools.emulator.client import Emulator
from valve_tools.emulator.node import NO_LATENCY, Options, node


def test_a_second_card_never_takes_the_folder_of_one_that_lives(emulator: Emulator, process: RmProcess) -> None:
    second = subprocess.run(
        Options().command(emulator.directory), capture_output=True, text=True, timeout=200, check=False
    )

    assert (second.returncode, second.stdout) == (2, "")
    assert "has this folder's card already" in second.stderr
    ctl = process.open("/dev/nvidiactl")
    process.alloc(ctl, 0, 0, 0, ROOT)
    assert process.pid in {client["pid"] for client in emulator.state().raw["clients"]}


def test_a_descriptor_of_one_card_never_acts_on_another(process: RmProcess, tmp_path: Path) -> None:
    """A left-over process of an earlier card in this folder passes its descriptors to a valved of the new one."""
    passed = process.open("/dev/nvidiactl")
    with node(Options(knobs=NO_LATENCY), tmp_path) as other, RmProcess(tmp_path) as valved:
        own = valved.open("/dev/nvidiactl")
        assert valved.alloc(own, 0, 0, 0, ROOT).errno == 0

        answer = valved.alloc(process.pass_fd(passed, valved), 0, 0, 0, ROOT)

        assert answer.errno == errno.EBADF
        assert len(other.state().raw["clients"]) == 1

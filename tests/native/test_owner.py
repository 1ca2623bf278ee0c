"""Whose an RM client is: the driver's own answer, on the descriptor that somebody passed."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from emulated import on_gpu
from gates import SETTINGS
from rm_process import RmProcess, Tree, grow_tree
from valved.native._gate import lib

from valved.gate.adapter import NativeGate
from valved.machine.uvm import UVM, is_file


def passed(process: RmProcess, fd: int) -> int:
    """A descriptor of another process, as the link would bring it."""
    process.call("send_fd", fd=fd)
    _, fds, _, _ = socket.recv_fds(process.relay, 1, 1)
    return fds[0]


def owns(tree: Tree, fd: int, *, h_client: int | None = None, uuid: bytes | None = None) -> bool:
    whose = tree.client if h_client is None else h_client
    return bool(lib.valve_rm_owns(fd, whose, tree.subdevice, 0x100, tree.uuid if uuid is None else uuid) == 0)


@on_gpu(gpus=2)
def test_an_rm_client_is_never_believed_to_be_a_file_that_did_not_make_it(cuda: Any) -> None:
    directory = Path(os.environ["VALVE_EMU_DIR"])
    gate = NativeGate(SETTINGS)
    with RmProcess(directory) as one, RmProcess(directory) as other:
        mine, theirs = grow_tree(one, gpu=0), grow_tree(other, gpu=1)
        ctl, node, foreign = passed(one, mine.ctl), passed(one, mine.node), passed(other, theirs.ctl)
        event = os.eventfd(0)
        fresh = os.open("/dev/nvidiactl", os.O_RDWR)

        assert owns(mine, ctl)
        assert owns(theirs, foreign)
        assert not owns(mine, foreign)
        assert not owns(mine, fresh)
        assert not owns(mine, event)  # nothing is asked of a file that is no driver's
        assert not owns(mine, node)
        assert not owns(mine, ctl, h_client=theirs.client)
        assert not owns(mine, ctl, uuid=theirs.uuid)  # the card is part of it
        mine.free(mine.client)
        assert not owns(mine, ctl)
        for fd in (ctl, node, foreign, event, fresh):
            os.close(fd)
    gate.close()


@on_gpu()
def test_a_descriptor_of_another_node_is_never_taken_for_the_uvm_file(cuda: Any) -> None:
    with RmProcess(Path(os.environ["VALVE_EMU_DIR"])) as process:
        uvm, ctl = passed(process, process.open("/dev/nvidia-uvm")), passed(process, process.open("/dev/nvidiactl"))

        assert is_file(uvm, UVM)
        assert not is_file(ctl, UVM)
        os.close(uvm)
        os.close(ctl)

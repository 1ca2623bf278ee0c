"""The stand-in management library, asked by NVIDIA's own Python package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from rm_process import RmProcess, grow_tree
from valve_tools.emulator.client import Emulator
from valve_tools.emulator.node import environment

MIB = 1 << 20


def ask(emulator: Emulator, expression: str, before: str = "") -> Any:
    """Evaluate an expression over pynvml `n` and the handle `h` of card 0 in a process on the node."""
    program = f"""
import json, pynvml as n
def refusal(call, *arguments):
    try:
        call(*arguments)
    except n.NVMLError as error:
        return str(error)
{before}
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
print(json.dumps({expression}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=emulator.directory,  # else valved is the checkout's, without its native part
        env=environment(emulator.directory, os.environ),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_shows_the_cards_and_the_driver_of_the_node(emulator: Emulator) -> None:
    gpu = emulator.state().raw["gpus"][0]

    seen = ask(
        emulator,
        "[n.nvmlDeviceGetCount(), n.nvmlDeviceGetName(h), n.nvmlDeviceGetUUID(h), n.nvmlSystemGetDriverVersion()]",
    )

    assert seen == [2, gpu["name"], gpu["uuid"], "580.159.04"]


def test_a_card_is_found_by_uuid_and_by_bus(emulator: Emulator) -> None:
    uuid = emulator.state().raw["gpus"][1]["uuid"]

    seen = ask(
        emulator,
        f"[n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID('{uuid}')),"
        "n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId('00000000:04:00.0'))]",
    )

    assert seen == [1, 1]


def test_memory_and_processes_follow_what_programs_hold(emulator: Emulator, process: RmProcess) -> None:
    tree = grow_tree(process)
    tree.allocate_memory(3 * MIB)

    seen = ask(
        emulator,
        "[n.nvmlDeviceGetMemoryInfo(h).used, n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2).used,"
        "[[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(h)]]",
    )

    assert seen == [3 * MIB, 3 * MIB, [[process.pid, 3 * MIB]]]


LOOKS = """
def looks():
    from valved.machine import cards
    reader = cards.CardReader()
    reader._room = cards.ctypes.create_string_buffer(ROOM * cards._PROCESS.size)
    assert cards._PROCESS.size == n.sizeof(n.c_nvmlProcessInfo_v3_t)
    told = lambda use: [use.total_bytes, use.used_bytes, sorted(use.by_pid.items())]
    return [list(map(told, reader.look().values())) for _ in (1, 2)]
"""


@pytest.mark.parametrize("room", [0, 1, 2, 32])
def test_no_process_on_a_card_is_missed_for_want_of_room(
    emulator: Emulator, process: RmProcess, another: RmProcess, room: int
) -> None:
    tree = grow_tree(process)
    tree.allocate_memory(3 * MIB)
    grow_tree(another)
    plain = ask(emulator, "[[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(h)]")

    first, second = ask(emulator, "looks()", LOOKS.replace("ROOM", str(room)))

    assert first == second
    assert first[0][1:] == [3 * MIB, sorted(plain)]
    assert len(plain) == 2


def test_utilisation_is_the_time_that_channels_execute(emulator: Emulator, process: RmProcess) -> None:
    idle = ask(emulator, "n.nvmlDeviceGetUtilizationRates(h).gpu")
    tree = grow_tree(process)
    process.call("work", cid=tree.cids[0], gpu=0)
    emulator.wait(lambda state: any(one.active for one in state.channels), "the kernel runs")

    busy = ask(emulator, "n.nvmlDeviceGetUtilizationRates(h).gpu")

    assert (idle, busy > 50) == (0, True)


def test_modes_that_decide_whether_valve_can_work_are_reported(emulator: Emulator) -> None:
    seen = ask(
        emulator,
        "[n.nvmlDeviceGetComputeMode(h), n.nvmlDeviceGetMigMode(h), n.nvmlDeviceGetGspFirmwareMode(h),"
        "n.nvmlDeviceGetPersistenceMode(h)]",
    )

    assert seen == [0, [0, 0], [1, 1], 1]


def test_modes_under_which_valve_cannot_work_can_be_had(emulator: Emulator) -> None:
    emulator.set(gsp=0, mig=1, compute_mode=3)

    seen = ask(
        emulator,
        "[n.nvmlDeviceGetComputeMode(h), n.nvmlDeviceGetMigMode(h), n.nvmlDeviceGetGspFirmwareMode(h)]",
    )

    assert seen == [3, [1, 1], [0, 1]]


def test_what_nobody_answers_is_a_clear_error(emulator: Emulator) -> None:
    seen = ask(emulator, "[refusal(n.nvmlDeviceGetPowerUsage, h), refusal(n.nvmlDeviceGetHostname_v1, h)]")

    assert seen == ["Not Supported", "Function Not Found"]

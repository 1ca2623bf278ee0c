"""NVML that never answers, or says nonsense: the loop, the start and the end of valved are none of its business."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace
from uuid import UUID

import pytest

from valved.cli import doctor
from valved.machine import cards
from valved.node import upkeep

GIB = 1 << 30
UUID_TEXT = "GPU-" + str(UUID(int=7))


@pytest.fixture
def nvml(monkeypatch):
    """One card. A test replaces what it says."""

    class NVMLError(Exception):
        pass

    def processes(handle, count, room):
        del handle
        count._obj.value = 1
        memoryview(room).cast("B")[: cards._PROCESS.size] = cards._PROCESS.pack(4711, 1 << 62, 0, 0)
        return 0

    fake = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_SUCCESS=0,
        NVML_ERROR_INSUFFICIENT_SIZE=7,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: UUID_TEXT,
        nvmlDeviceGetName=lambda handle: "card",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 * GIB, used=1 << 63),
        nvmlDeviceGetMigMode=lambda handle: (0, 0),
        nvmlLib=SimpleNamespace(nvmlDeviceGetComputeRunningProcesses_v3=processes),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def stuck(nvml):
    """NVML hangs in its first call, until the test is over."""
    hung = threading.Event()
    nvml.nvmlInit = hung.wait
    yield nvml
    hung.set()


def test_a_start_never_waits_for_the_names_of_cards_that_do_not_answer(stuck, monkeypatch):
    monkeypatch.setattr(cards, "NAMES_S", 0.01)

    assert cards.by_uuid() == {}


def test_names_that_come_late_are_never_lost(nvml, monkeypatch):
    monkeypatch.setattr(cards, "NAMES_S", 0.01)
    answer = threading.Event()
    nvml.nvmlInit = answer.wait
    before = set(threading.enumerate())

    found = cards.by_uuid()
    assert found == {}
    answer.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(100)

    assert found[UUID(int=7).bytes].name == "card"


@pytest.mark.parametrize("uuid", ["GPU-what", "", "GPU-"])
def test_a_card_whose_number_is_nonsense_never_fails_the_start_nor_the_looks(nvml, uuid):
    nvml.nvmlDeviceGetUUID = lambda handle: uuid

    assert cards.by_uuid() == {}
    assert cards.CardReader().look() == {}


def test_nobody_on_a_card_ever_has_more_memory_than_the_card(nvml):
    """It would be kept free for a service of that name for an hour."""
    (use,) = cards.CardReader().look().values()

    assert (use.used_bytes, use.by_pid) == (80 * GIB, {4711: 80 * GIB})


ENDS = """
import asyncio, sys, threading, types
fake = types.SimpleNamespace(NVMLError=Exception, nvmlInit=threading.Event().wait, nvmlShutdown=threading.Event().wait)
sys.modules["pynvml"] = fake
from valved.machine.cards import CardReader
from valved.node.upkeep import end, keep_reading
memory = types.SimpleNamespace(is_in_use=True)
async def main():
    task = asyncio.create_task(keep_reading(memory, None, CardReader()))
    while not [one for one in threading.enumerate() if one is not threading.main_thread()]:
        await asyncio.sleep(0)
    await end([task])
asyncio.run(main())
print("ended")
"""


def test_valved_never_waits_at_its_end_for_a_card_that_does_not_answer(tmp_path):
    run = [sys.executable, "-c", ENDS]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)

    assert done.stdout == "ended\n", done.stderr


def test_a_reader_that_begins_anew_without_end_never_has_more_than_one_thread(nvml, monkeypatch):
    """As while what the cards say fails those who need it, each second."""
    monkeypatch.setattr(upkeep, "AGAIN_S", 0.0)
    looks = []

    def fails(found):
        looks.append(found)
        raise KeyError("a defect")

    async def main():
        memory = SimpleNamespace(is_in_use=True, see_cards=fails)
        make = partial(upkeep.keep_reading, memory, None, cards.CardReader())
        task = asyncio.create_task(upkeep.keep_going("cards", make, print))
        while len(looks) < 20:
            await asyncio.sleep(0)
        await upkeep.end([task])

    before = set(threading.enumerate())
    asyncio.run(main())

    assert len(set(threading.enumerate()) - before) <= 1


def test_a_look_that_never_ends_is_never_silent(stuck, monkeypatch, caplog):
    monkeypatch.setattr(cards, "SILENT_S", 0.01)

    async def look():
        task = asyncio.create_task(cards.CardReader().read())
        while "the cards do not answer" not in caplog.text:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(look())


def test_the_doctor_never_hangs_with_the_card_it_is_asked_about(stuck, monkeypatch):
    monkeypatch.setattr(doctor, "CARDS_S", 0.01)

    (found,) = doctor.check_cards()

    assert found.verdict is doctor.Grade.UNKNOWN
    assert "has not answered" in found.what


def test_a_check_that_cannot_look_never_ends_the_doctor(monkeypatch, capsys):
    """Any user may make /tmp/nvidia-mps, so that nobody else can look into it."""

    def check_closed():
        raise PermissionError(13, "Permission denied", "/tmp/nvidia-mps/control")

    monkeypatch.setattr(doctor, "CHECKS", (check_closed, doctor.check_glibc))
    monkeypatch.setattr(doctor, "check_valved", lambda: [])
    monkeypatch.setattr(doctor, "check_cards", lambda: [])

    assert doctor.doctor(SimpleNamespace(json=False)) == 0

    first, second = capsys.readouterr().out.splitlines()
    assert "unknown  closed: cannot look" in first
    assert "glibc" in second


def test_processes_that_this_user_may_not_see_are_never_counted_as_absent(tmp_path):
    assert doctor.check_dcgm(tmp_path).verdict is doctor.Grade.UNKNOWN


def test_a_card_that_did_not_change_never_differs_from_what_was_read_before(nvml):
    """Else every client is told of it anew, each second."""
    reader = cards.CardReader()
    first, then = reader.look(), reader.look()

    assert next(iter(first.values())).read_ns < next(iter(then.values())).read_ns
    assert first == then

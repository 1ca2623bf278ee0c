"""How callers find entry points: by name, by (base name, version, flags), and what is honestly missing."""

from __future__ import annotations

import ctypes
import os
import re
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

from cuda_driver import INVALID_VALUE, NOT_FOUND, NOT_INITIALIZED, Cuda
from emulated import on_gpu

FOUND, UNKNOWN, TOO_NEW = 0, 1, 2
PER_THREAD = 2


def ask(cuda: Cuda, name: str, version: int, flags: int = 0) -> tuple[int | None, int]:
    pointer, status = c_void_p(), c_int(-1)
    cuda.cuGetProcAddress_v2(ctypes.c_char_p(name.encode()), byref(pointer), version, flags, byref(status))
    return pointer.value, status.value


def export(cuda: Cuda, symbol: str) -> int | None:
    return ctypes.cast(getattr(cuda.library, symbol), c_void_p).value


class Entry(ctypes.Structure):
    _fields_ = (("symbol", ctypes.c_char_p), ("function", c_void_p), ("since", c_int))


def entries(cuda: Cuda) -> list[tuple[str, int]]:
    """Each entry point that the library lists, and the first version that has it."""
    count, list_of = c_size_t(), cuda.library.valve_emu_entries
    list_of.restype = ctypes.POINTER(Entry)
    first = list_of(byref(count))
    return [(first[index].symbol.decode(), first[index].since) for index in range(count.value)]


@on_gpu()
def test_every_entry_point_is_exported_and_found_at_its_version(cuda: Cuda) -> None:
    wrong = []
    for symbol, since in entries(cuda):
        base = re.fullmatch(r"(\w+?)(_v\d)?(_pt[ds][sz])?", symbol)
        flags = PER_THREAD if base and base[3] else 0
        if not base or ask(cuda, base[1], since, flags) != (export(cuda, symbol), FOUND):
            wrong.append(symbol)

    assert wrong == []
    assert len(entries(cuda)) >= 300


@on_gpu()
def test_the_version_asked_for_decides_between_forms_of_one_name(cuda: Cuda) -> None:
    forms = {version: ask(cuda, "cuCtxCreate", version)[0] for version in (3020, 11040, 12050)}

    assert list(forms.values()) == [export(cuda, f"cuCtxCreate_v{number}") for number in (2, 3, 4)]
    assert ask(cuda, "cuCtxCreate", 12000)[0] == export(cuda, "cuCtxCreate_v3")


@on_gpu()
def test_a_name_older_callers_cannot_know_is_told_from_one_nobody_knows(cuda: Cuda) -> None:
    assert ask(cuda, "cuLaunchKernelEx", 11000) == (None, TOO_NEW)
    assert ask(cuda, "cuNoSuchCall", 13000) == (None, UNKNOWN)
    assert ask(cuda, "cuMemAlloc_v2", 13000) == (None, UNKNOWN)  # base names only


@on_gpu()
def test_the_per_thread_flag_falls_back_to_the_only_form_there_is(cuda: Cuda) -> None:
    assert ask(cuda, "cuLaunchKernel", 12000, 2)[0] == export(cuda, "cuLaunchKernel_ptsz")
    assert ask(cuda, "cuLaunchKernel", 6000, 2)[0] == export(cuda, "cuLaunchKernel")
    assert ask(cuda, "cuMemAlloc", 12000, 2)[0] == export(cuda, "cuMemAlloc_v2")


@on_gpu()
def test_the_first_form_of_the_lookup_has_no_status_and_fails_instead(cuda: Cuda) -> None:
    pointer = c_void_p()

    assert cuda.call("cuGetProcAddress", ctypes.c_char_p(b"cuInit"), byref(pointer), 2000, 0) == 0
    assert cuda.call("cuGetProcAddress", ctypes.c_char_p(b"cuNone"), byref(pointer), 2000, 0) == NOT_FOUND


@on_gpu()
def test_private_tables_are_refused(cuda: Cuda) -> None:
    table = c_void_p(1)

    assert cuda.call("cuGetExportTable", byref(table), (ctypes.c_char * 16)()) == NOT_FOUND
    assert table.value is None


@on_gpu()
def test_nothing_works_before_init_and_errors_have_names(cuda: Cuda) -> None:
    assert cuda.call("cuDeviceGetCount", byref(c_int())) == NOT_INITIALIZED
    assert cuda.call("cuMemAlloc_v2", byref(c_uint64()), 4096) == NOT_INITIALIZED
    assert cuda.call("cuInit", 7) == INVALID_VALUE
    assert cuda.error_name(700) == "CUDA_ERROR_ILLEGAL_ADDRESS"


@on_gpu()
def test_a_forked_child_is_not_initialised_and_its_parent_goes_on(cuda: Cuda) -> None:
    cuda.start()
    child = os.fork()
    if child == 0:
        codes = {
            cuda.call("cuInit", 0),
            cuda.call("cuCtxSynchronize"),
            cuda.call("cuMemAlloc_v2", byref(c_uint64()), 8),
        }
        os._exit(0 if codes == {NOT_INITIALIZED} else 1)
    _, status = os.waitpid(child, 0)
    cuda.launch(cuda.kernel("emu_spin"), 10)
    cuda.cuCtxSynchronize()

    assert status == 0


@on_gpu(gpus=3)
def test_visible_devices_are_chosen_and_ordered_by_the_environment(cuda: Cuda) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "2,0"
    ctypes.CDLL(None).setenv(b"CUDA_VISIBLE_DEVICES", b"2,0", 1)
    cuda.cuInit(0)
    buses = [ctypes.create_string_buffer(20) for _ in range(2)]
    for ordinal, bus in enumerate(buses):
        cuda.cuDeviceGetPCIBusId(bus, 20, ordinal)

    assert cuda.value("cuDeviceGetCount", kind=c_int) == 2
    assert buses[0].value > buses[1].value

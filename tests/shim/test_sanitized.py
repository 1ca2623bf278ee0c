"""The shim's C under sanitizers: the ioctl parser on any bytes, and its threads against each other."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

RM = ("channels/rm", "channels/rmcall", "channels/rmcontrol")
ORDERS = ("kv/vmm", "kv/ranges", "kv/places", "kv/parts", "link/packet", "lock")
KV = ("orders", "zeroing", "announce", "alloc", "answers", "scratch")
MEMORY = (*ORDERS, "link/ownfd", *(f"kv/{part}" for part in KV))
STRICT = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
LINK = (*(f"link/{part}" for part in ("link", "request", "pages", "until", "ownfd", "orphan", "packet")), "lock")
THREADS = (
    *("activity/activity", "activity/contexts", "activity/hint", "activity/watcher"),
    *("link/ownfd", "link/pages", "lock", "say"),
)
SHIM = ("shim/src", *(f"shim/src/{room}" for room in ("activity", "channels", "hooks", "kv", "link")))


def build(repository, out, source, parts, *flags):
    sources = [repository / source, *(repository / "shim/src" / f"{part}.c" for part in parts)]
    include = [f"-I{repository}/{folder}" for folder in ("proto/abi", *SHIM, "tests/shim/c")]
    command = ["cc", "-std=gnu11", "-D_GNU_SOURCE", "-U_FILE_OFFSET_BITS", "-U_FORTIFY_SOURCE", "-O1", "-g", "-Wall"]
    subprocess.run([*command, *include, *flags, *sources, "-o", out], check=True)
    return out


@pytest.fixture(scope="session")
def parser(tmp_path_factory, repository):
    out = tmp_path_factory.mktemp("fuzz") / "fuzz_capture"
    return build(repository, out, "tests/fuzz/fuzz_capture.c", RM, *STRICT)


@pytest.mark.sanitizer
@pytest.mark.parametrize("seed", [1, 20260, 777777])
def test_the_ioctl_parser_survives_any_bytes(parser, seed):
    done = subprocess.run([parser, "-r", "20000", str(seed)], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "20000 inputs\n", "")


@pytest.mark.sanitizer
def test_the_ioctl_parser_survives_odd_lengths(parser, tmp_path):
    inputs = []
    for length in (0, 1, 71, 72, 73, 4095, 4096, 9000):
        inputs.append(tmp_path / str(length))
        inputs[-1].write_bytes(bytes(i * 37 % 256 for i in range(length)))

    done = subprocess.run([parser, *inputs], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "8 inputs\n", "")


@pytest.mark.sanitizer
def test_launches_the_watcher_and_the_gate_do_not_race(repository, tmp_path):
    program = build(repository, tmp_path / "races", "tests/shim/c/races.c", THREADS, "-fsanitize=thread", "-lpthread")

    done = subprocess.run([program, "200"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "every launch was counted, every open gate heard, idleness was never claimed too early\n"


@pytest.fixture(scope="session")
def order_fuzzer(tmp_path_factory, repository):
    out = tmp_path_factory.mktemp("fuzz") / "fuzz_order"
    return build(repository, out, "tests/fuzz/fuzz_order.c", ORDERS, *STRICT)


@pytest.mark.sanitizer
@pytest.mark.parametrize("seed", [1, 20260, 777777])
def test_orders_of_any_bytes_leave_true_books(order_fuzzer, seed):
    done = subprocess.run(
        [order_fuzzer, "-r", "20000", str(seed)], capture_output=True, text=True, timeout=200, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "20000 inputs\n", "")


@pytest.fixture(scope="session")
def link_fuzzer(tmp_path_factory, repository):
    out = tmp_path_factory.mktemp("fuzz") / "fuzz_link"
    fuzz = repository / "tests/fuzz"
    model = ("-include", fuzz / "kernel.h", *(fuzz / name for name in ("kernel.c", "kernel_pages.c", "rest.c")))
    return build(repository, out, "tests/fuzz/fuzz_link.c", LINK, *STRICT, *model)


def said_of(link_fuzzer, *events):
    """What the fuzzer says of one order of events, each its row in tests/fuzz/link_events.h and its detail."""
    order = "".join(f"{row * 8 + detail:02x}" for row, detail in events)
    done = subprocess.run([link_fuzzer, order], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.sanitizer
def test_no_launches_run_beside_online_work_under_a_valved_that_hangs_after_it_called_a_drain_off(link_fuzzer):
    drain, online, stop, go_on, hang = (13, 1), (10, 1), (4, 1), (13, 0), (9, 2)

    assert said_of(link_fuzzer, drain, online, stop, go_on, hang) == (0, "1 inputs\n", "")


@pytest.mark.sanitizer
def test_a_valved_that_has_lost_a_process_never_ends_the_hold_of_its_successor(link_fuzzer):
    break_link, hold, let_launches_go_by_the_old_page = (0, 0), (4, 2), (5, 0)

    said = said_of(link_fuzzer, break_link, hold, hold, let_launches_go_by_the_old_page)

    assert said == (0, "1 inputs\n", "")


@pytest.mark.sanitizer
def test_a_stop_that_a_valved_took_over_while_the_link_was_broken_never_outlives_it(link_fuzzer):
    take_number, close_all, few_numbers, none_left = (19, 7), (11, 7), (20, 1), (20, 7)
    granted, stop, clear = (14, 3), (31, 7), (14, 1)

    broken = (take_number, close_all, few_numbers, *[close_all] * 4, none_left, close_all)

    assert said_of(link_fuzzer, *broken, granted, stop, clear) == (0, "1 inputs\n", "")


@pytest.mark.sanitizer
@pytest.mark.parametrize("is_over", [False, True], ids=["granted-later", "over-before"])
def test_granted_time_never_goes_on_beside_a_service_that_comes_once_a_valved_has_hung(link_fuzzer, is_over):
    """Nobody needed us off while it hung, so we ran. It goes on before it sees that we left."""
    broken, leave_once_we_have_called = (3, 0), [(25, 4), (6, 1)]
    granted, hang, time_passes, beat, online = (14, 2), (9, 2), (16, 2), (9, 1), (10, 1)
    told = [granted, hang, time_passes] if is_over else [hang, granted]

    said = said_of(link_fuzzer, broken, *leave_once_we_have_called, *told, beat, online)

    assert said == (0, "1 inputs\n", "")


@pytest.mark.sanitizer
def test_the_model_asks_no_process_to_hear_what_was_said_after_it_hung_up(link_fuzzer):
    answer_late, refuse, link_breaks = (18, 1), (8, 1), [(28, 0), (25, 6), (21, 0)]
    an_ack_comes_first = [(25, 6), (0, 0)]
    hold_after_the_link, lose, let_go = [(26, 6), (4, 1)], (29, 1), (5, 0)
    relinked = [(26, 0), (0, 0), (0, 0), (26, 0), (0, 0)]

    unheard = said_of(link_fuzzer, answer_late, refuse, *link_breaks, *an_ack_comes_first)
    held_later = said_of(link_fuzzer, *relinked, *hold_after_the_link, lose, let_go)

    assert (unheard, held_later) == ((0, "1 inputs\n", ""),) * 2


@pytest.mark.sanitizer
def test_no_order_of_link_events_lets_launches_or_channels_go_that_nobody_let(link_fuzzer):
    done = subprocess.run([link_fuzzer, "-r", "5000", "7"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "5000 inputs\n", "")


@pytest.mark.sanitizer
def test_orders_on_a_driver_that_fails_at_random_leave_no_handle_and_no_descriptor(repository, tmp_path):
    program = build(repository, tmp_path / "kvorders", "tests/shim/c/kvorders.c", ORDERS, *STRICT)

    done = subprocess.run([program, "5000", "3"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "5000 orders\n"), done.stderr
    assert "calls failed" in done.stderr


@pytest.mark.sanitizer
def test_the_memory_thread_applications_and_the_keeper_do_not_race(repository, tmp_path):
    program = build(
        repository, tmp_path / "kvthreads", "tests/shim/c/kvthreads.c", MEMORY, "-fsanitize=thread", "-lpthread"
    )

    done = subprocess.run([program, "1500", "1"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "nothing is mapped and nobody waits\n"), done.stderr


def test_free_memory_is_never_told_as_gone_because_a_range_came_in_between(repository, tmp_path):
    program = build(repository, tmp_path / "kvinfo", "tests/shim/c/kvinfo.c", ("kv/answers", "kv/ranges"), *STRICT)

    done = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)

    assert (done.returncode, done.stdout) == (0, "asked\n"), done.stderr


def has_libfuzzer() -> bool:
    """clang and its fuzzer runtime: distributions package them apart."""
    if not shutil.which("clang"):
        return False
    asked = ["clang", "-print-file-name=libclang_rt.fuzzer-x86_64.a"]
    return Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()).is_absolute()


@pytest.mark.sanitizer
@pytest.mark.skipif(not has_libfuzzer(), reason="no libFuzzer: apt-get install clang libclang-rt-14-dev")
@pytest.mark.parametrize(("name", "parts"), [("capture", RM), ("order", ORDERS)])
def test_coverage_guided_inputs_break_neither_the_ioctl_parser_nor_orders(repository, tmp_path, name, parts):
    """The same entry points under libFuzzer; `make fuzz` runs them for millions of inputs."""
    out, corpus = tmp_path / "fuzzer", tmp_path / "corpus"
    corpus.mkdir()
    sources = [repository / f"tests/fuzz/fuzz_{name}.c", *(repository / "shim/src" / f"{part}.c" for part in parts)]
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-DFUZZER", "-O1", "-g"]
    flags += [f"-I{repository}/{folder}" for folder in ("proto/abi", *SHIM, "tests/shim/c")]
    flags += ["-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(["clang", *flags, *sources, "-o", out], check=True)

    done = subprocess.run(
        [out, "-runs=300000", "-seed=1", "-max_len=9000", corpus],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert "Done 300000 runs" in done.stderr


def test_a_number_that_is_busy_never_keeps_a_process_from_its_link(repository, tmp_path):
    """The caller holds the link's lock: every thread that sends would wait as well."""
    program = build(repository, tmp_path / "busyfd", "tests/shim/c/busyfd.c", ("link/ownfd",), "-Wl,--wrap=syscall")

    done = subprocess.run([program], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "1 1\n")

"""tools/emulator/run and the environment it gives to programs."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from rm_process import RmProcess, grow_tree
from valve_tools.emulator import run as runner_module
from valve_tools.emulator.client import Emulator
from valve_tools.emulator.node import LIBRARIES, NO_LATENCY, Options, environment, is_running, node

RUN = [sys.executable, "-m", "valve_tools.emulator.run"]


def run(*arguments: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "VALVE_EMU_DIR"}
    return subprocess.run([*RUN, *arguments], env=env, capture_output=True, text=True, timeout=200, check=False)


def test_a_program_finds_the_cards_it_was_promised() -> None:
    code = "import os; print([os.path.exists(f'/dev/nvidia{n}') for n in range(4)])"

    done = run("--gpus", "3", "--", sys.executable, "-c", code)

    assert (done.returncode, done.stdout.strip()) == (0, "[True, True, True, False]")


def test_the_banner_names_the_seed_on_standard_error() -> None:
    done = run("--seed", "77", "--", "true")

    assert "seed 77" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--", "no-such-program"), 127, "no-such-program: No such file"),
        (("--", "/etc/passwd"), 126, "/etc/passwd: Permission denied"),
        (("--dir", "/proc/folder", "--", "true"), 1, "No such file or directory: '/proc/folder'"),
        (("--gpus", "99", "--", "true"), 1, "did not start"),
    ],
)
def test_what_cannot_be_run_is_never_answered_with_a_traceback(arguments: list[str], code: int, said: str) -> None:
    done = run(*arguments)

    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert said in done.stderr


def test_a_user_whose_card_it_is_not_is_told_to_use_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "lock"))

    monkeypatch.setattr(runner_module, "shared_node", refuse)

    assert runner_module.main(["--dir", str(tmp_path), "--", "true"]) == 1
    assert capsys.readouterr().err.rstrip().endswith("use a folder of your own: --dir, or VALVE_EMU_DIR")


def test_a_card_of_another_size_than_the_usual_one_can_be_had() -> None:
    assert run("--bytes", str(24 << 30), "--", "true").returncode == 0


def test_the_exit_code_is_the_program_s() -> None:
    assert run("--", "sh", "-c", "exit 7").returncode == 7


def test_the_server_ends_with_the_command_that_started_it(tmp_path: Path) -> None:
    run("--dir", str(tmp_path), "--", "true")

    assert not is_running(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_server_outlives_a_runner_without_a_command_that_was_told_to_end(tmp_path: Path, number: int) -> None:
    runner = subprocess.Popen([*RUN, "--dir", str(tmp_path)], stderr=subprocess.PIPE)
    try:
        assert runner.stderr is not None
        runner.stderr.readline()  # the node is up
        runner.send_signal(number)
        runner.wait(200)
        assert not is_running(tmp_path)
    finally:
        runner.kill()
        with suppress(OSError), Emulator(tmp_path) as emulator:
            emulator.quit()


def test_a_folder_that_nobody_named_never_stays(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "VALVE_EMU_DIR"} | {"TMPDIR": str(tmp_path)}

    subprocess.run([*RUN, "--", "true"], env=env, check=True, timeout=200)

    assert list(tmp_path.iterdir()) == []


def test_the_server_stays_until_the_last_command_has_left(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "VALVE_EMU_DIR"}
    wait_for_line = ["sh", "-c", "echo up; read line"]
    commands = [
        subprocess.Popen(
            [*RUN, "--dir", str(tmp_path), "--", *wait_for_line],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(2)
    ]
    for command in commands:
        assert command.stdout is not None
        assert command.stdout.readline() == "up\n"

    running = []
    for command in commands:
        command.communicate("\n", timeout=200)
        running.append(is_running(tmp_path))

    assert running == [True, False]


def test_a_second_command_joins_the_node_that_runs(emulator: Emulator) -> None:
    code = "print(open('/dev/nvidia-emu-state').read()[:12])"

    done = run("--dir", str(emulator.directory), "--gpus", "8", "--", sys.executable, "-c", code)

    assert (done.stdout.strip(), "seed" in done.stderr) == ('{"driver":"5', False)
    assert is_running(emulator.directory)


def test_knobs_and_faults_can_be_given_at_start(tmp_path: Path) -> None:
    code = "import json; print(json.load(open('/dev/nvidia-emu-state'))['knobs']['lock'])"

    done = run("--set", "lock=device-only", "--fault", "on disable: silent", "--", sys.executable, "-c", code)

    assert done.stdout.strip() == "device-only"


def test_the_board_shows_the_defaults_when_nothing_is_set() -> None:
    code = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetGspFirmwareMode(n.nvmlDeviceGetHandleByIndex(0)))"

    assert run("--", sys.executable, "-c", code).stdout.strip() == "[1, 1]"


def test_a_bad_knob_stops_the_start() -> None:
    done = run("--set", "lock=brass", "--", "true")

    assert done.returncode != 0
    assert "lock=brass" in done.stderr


def test_our_preload_stands_behind_those_that_are_there() -> None:
    env = environment(Path("/nowhere"), {"LD_PRELOAD": "libvalve.so", "LD_LIBRARY_PATH": "/opt/lib"})

    assert env["LD_PRELOAD"].split(":") == ["libvalve.so", str(LIBRARIES / "libfakenv.so")]
    assert env["LD_LIBRARY_PATH"].split(":") == [str(LIBRARIES), "/opt/lib"]


def test_the_preload_alone_changes_nothing() -> None:
    env = environment(Path("/nowhere"), os.environ)
    del env["VALVE_EMU_DIR"]

    done = subprocess.run(["ls", "/dev/nvidiactl"], env=env, capture_output=True, text=True, check=False)

    assert "No such file" in done.stderr


def test_without_a_server_the_nodes_look_like_an_unloaded_driver(tmp_path: Path) -> None:
    code = "import os\ntry: os.open('/dev/nvidiactl', 2)\nexcept OSError as e: print(e.errno)"

    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(tmp_path, os.environ),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout.strip() == "19"  # ENODEV


def ctl(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "valve_tools.emulator.ctl", "--dir", str(directory), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_a_running_node_is_looked_at_and_changed_from_a_shell() -> None:
    with node(Options(gpus=2, knobs=NO_LATENCY)) as emulator, RmProcess(emulator.directory) as process:
        grow_tree(process)
        changed = ctl(emulator.directory, "set", "rpc_us=7", "costs=a100")
        spent = ctl(emulator.directory, "spent", str(process.pid))
        told = ctl(emulator.directory, "tell", str(process.pid), "unmap_waits=1")
        wrong = ctl(emulator.directory, "set", "rpc_us=fast")
        knobs = json.loads(ctl(emulator.directory, "get").stdout)

    assert (changed.returncode, changed.stdout) == (0, "")
    assert (knobs["rpc_us"], knobs["map_us"]) == (7, 36)
    assert spent.stdout.splitlines()[1].split()[:2] == ["other", "ioctl"]
    assert (told.returncode, "has no setting unmap_waits" in told.stderr) == (1, True)
    assert (wrong.returncode, "rpc_us fast" in wrong.stderr) == (1, True)


def test_a_node_that_runs_already_is_never_joined_without_a_word(tmp_path: Path) -> None:
    with node(Options(gpus=1), tmp_path):
        asked = run("--dir", str(tmp_path), "--gpus", "8", "--set", "rpc_us=1", "--", "true")
        plain = run("--dir", str(tmp_path), "--", "true")

    assert asked.returncode == 0
    assert asked.stderr == f"the emulated node in {tmp_path} runs already and is joined: no use for --gpus, --set\n"
    assert plain.stderr == ""

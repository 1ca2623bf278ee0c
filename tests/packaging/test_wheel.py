"""The wheel, as a stranger would install it: everything is in it, and nothing is taken from the checkout."""

import os
import subprocess
import sys
import zipfile

import pytest

NATIVE = (
    "valved/lib/libvalve.so",
    "valved/lib/libvalve-cuda.so",
    "valve_tools/emulator/lib/valve-emu-server",
    "valve_tools/emulator/lib/libfakenv.so",
    "valve_tools/emulator/lib/libcuda.so.1",
    "valve_tools/emulator/lib/libnvidia-ml.so.1",
)
PYTHON = (
    "valved/main.py",
    "valve/v1/node_pb2_grpc.py",
    "valve_tools/bench/command.py",
    "valve_scheduler/placement/rank.py",
)


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
    ]
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    subprocess.run([*pip, "-w", str(folder), str(repository)], check=True, env={**os.environ, "PATH": path})
    (found,) = folder.glob("valve-*.whl")
    return found


def test_the_wheel_holds_every_room_and_no_tests(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())

    assert set() == {*NATIVE, *PYTHON} - names
    assert not [name for name in names if name.startswith(("tests/", "build/")) or "__pycache__" in name]


def test_an_installed_wheel_gives_a_working_command_far_from_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--target",
        str(site),
    ]
    subprocess.run([*pip, str(wheel)], check=True)
    env = {**os.environ, "PYTHONPATH": str(site), "VALVE_RUN_DIR": str(tmp_path / "run")}

    version = subprocess.run(
        [site / "bin" / "valve", "--version"], check=True, cwd="/", env=env, capture_output=True, text=True
    )
    where = subprocess.run(
        [sys.executable, "-c", "import valved; print(valved.__file__)"],
        check=True,
        cwd="/",
        env=env,
        capture_output=True,
        text=True,
    )

    assert version.stdout.strip()
    assert where.stdout.startswith(str(site))

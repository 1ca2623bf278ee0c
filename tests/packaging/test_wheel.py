"""The wheels, as a stranger would install them: everything is in one of two, nothing is taken from the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from valve_tools.cluster import product

PRODUCT = (
    "valved/lib/libvalve.so",
    "valved/lib/libvalve-cuda.so",
    "valved/main.py",
    "valve/v1/node_pb2_grpc.py",
    "valve_scheduler/placement/rank.py",
    "valve_hook/vllm/plugin.py",
)
TOOLS = (
    "valve_tools/emulator/lib/valve-emu-server",
    "valve_tools/emulator/lib/libfakenv.so",
    "valve_tools/emulator/lib/libcuda.so.1",
    "valve_tools/emulator/lib/libnvidia-ml.so.1",
    "valve_tools/bench/command.py",
)
STAND_INS = ("libcuda.so", "libnvidia-ml.so", "libfakenv.so")
PIP = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")


@pytest.fixture(scope="module")
def wheels(repository, tmp_path_factory) -> dict[str, Path]:
    """In the folders of `make build`, under its lock: nothing that is built is compiled again."""
    folder = tmp_path_factory.mktemp("wheels")
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    for source, built in ((repository, "wheel"), (repository / "tools", "tools-wheel")):
        (repository / "build").mkdir(exist_ok=True)
        make = [*PIP, "wheel", "--no-deps", "--no-build-isolation", f"-Cbuild-dir={repository / 'build' / built}"]
        lock = ["flock", "-o", str(repository)]
        subprocess.run([*lock, *make, "-w", str(folder), str(source)], check=True, env={**os.environ, "PATH": path})
    return {found.name.split("-")[0]: found for found in folder.glob("*.whl")}


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_each_wheel_holds_its_rooms_and_no_tests(wheels):
    for name, wanted in (("valve", PRODUCT), ("valve_tools", TOOLS)):
        names = names_in(wheels[name])

        assert set() == set(wanted) - names
        assert not [name for name in names if name.startswith(("tests/", "build/")) or "__pycache__" in name]


def test_no_production_wheel_holds_a_stand_in_driver_library_or_a_tool(wheels):
    names = names_in(wheels["valve"])

    assert not [name for name in names if name.startswith(("valve_tools/", "valve_tune/"))]
    assert not [name for name in names if os.path.basename(name).startswith(STAND_INS)]
    assert not names & names_in(wheels["valve_tools"])


def test_no_production_image_holds_a_stand_in_driver_library_or_a_tool(wheels, capsys):
    held = product.contents()
    with capsys.disabled():
        image, wheel = sum(path.stat().st_size for path in held), wheels["valve"].stat().st_size
        print(f"\nproduction image: {image / 2**20:.0f} MiB with its interpreter; wheel: {wheel / 2**20:.1f} MiB")

    assert {"valved", "valve_scheduler"} <= {part for path in held for part in path.parts}
    assert not [path for path in held if "valve_tools" in path.parts or path.name.startswith(STAND_INS)]


def test_an_installed_wheel_gives_a_working_command_far_from_the_checkout(wheels, tmp_path):
    site = tmp_path / "site"
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(site), str(wheels["valve"])], check=True)
    env = {**os.environ, "PYTHONPATH": str(site), "VALVE_RUN_DIR": str(tmp_path / "run")}
    without_tools = "import valved.cli.main as cli; cli.plugins = dict; raise SystemExit(cli.main(['demo']))"

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, check=False)

    version = run(str(site / "bin" / "valve"), "--version")
    where = run(sys.executable, "-c", "import valved; print(valved.__file__)")
    demo = run(sys.executable, "-c", without_tools)

    assert version.returncode == 0
    assert version.stdout.strip()
    assert where.stdout.startswith(str(site))
    assert demo.returncode == 2
    assert "in a checkout of Valve: pip install ./tools" in demo.stderr

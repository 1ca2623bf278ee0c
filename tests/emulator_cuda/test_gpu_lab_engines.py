"""The PyTorch engines print what the demo's programs print, on whatever device there is."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import valve_tools.gpu.engines
from valve_tools.demo.figures import parse_online, units_between

ENGINES = Path(valve_tools.gpu.engines.__file__).parent
TINY = ["--shape", "tiny", "--device", "cpu", "--slots", "4"]
DEADLINE_S = 200  # only ends a hung test


@pytest.fixture(scope="module")
def python():
    """An interpreter with PyTorch; VALVE_LAB_PYTHON may name one."""
    for candidate in filter(None, [os.environ.get("VALVE_LAB_PYTHON"), sys.executable, shutil.which("python3")]):
        if not subprocess.run([candidate, "-c", "import torch"], capture_output=True, check=False).returncode:
            return candidate
    pytest.skip("no python with PyTorch: pip install torch, or name one in VALVE_LAB_PYTHON")


def lines_of(python, program, *arguments):
    command = [python, str(ENGINES / program), *TINY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_online_engine_answers_every_request_and_says_how_fast(python):
    arrivals = ["--duration", "2", "--rate", "4", "--in-tokens", "8", "--out-tokens", "4"]
    lines = lines_of(python, "torch_online.py", *arrivals, "--room", "64")

    served = parse_online(lines)
    summary = json.loads(lines[-1])
    assert len(served.requests) == summary["finished"] > 1
    assert all(request.ttft_ms > 0 and request.tpot_ms > 0 for request in served.requests)
    assert served.wall_s > 1


def test_the_offline_engine_makes_the_same_tokens_every_time(python, tmp_path):
    digests = tmp_path / "digests.json"
    arguments = ["--units", "6", "--tokens", "6", "--report", "0.001", "--digests", str(digests)]

    first = lines_of(python, "torch_offline.py", *arguments)
    again = lines_of(python, "torch_offline.py", *arguments)

    assert json.loads(first[-1])["checksum"] == json.loads(again[-1])["checksum"]
    assert json.loads(again[-1])["ok"]
    assert len(set(json.loads(digests.read_text()).values())) == 4
    assert units_between(first, 0, 1e12) == 6


def test_a_wrong_token_is_noticed(python, tmp_path):
    digests = tmp_path / "digests.json"
    digests.write_text(json.dumps({"1": "0123456789abcdef"}))
    command = [python, str(ENGINES / "torch_offline.py"), *TINY, "--units", "2", "--digests", str(digests)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    assert done.returncode == 1
    assert not json.loads(done.stdout.splitlines()[-1])["ok"]

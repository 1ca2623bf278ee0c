"""Golden traces: what the tracer writes is documented, and replayed on the emulated GPU it finds what differs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import valve_tools.gpu
from jsonschema import Draft202012Validator
from valve_tools.emulator.node import NO_LATENCY, Options, environment, node

DEADLINE_S = 200  # only ends a hung test


@pytest.fixture(scope="module", params=["535.98", "580.159.04", "590.48.01"])
def trace(request, tmp_path_factory, lab_programs):
    """(driver, lines) of a small workload from start to end."""
    folder = tmp_path_factory.mktemp("trace")
    options = Options(seed=7, knobs={**NO_LATENCY, "driver": request.param})  # another card than the one that replays
    with node(options, folder / "node") as emulator:
        env = environment(emulator.directory, os.environ)
        env["LD_PRELOAD"] = f"{lab_programs.path('libtrace.so')}:{env['LD_PRELOAD']}"
        env["VALVE_LAB_TRACE"] = str(folder / "trace.jsonl")
        env["VALVE_LAB_BRANCH"] = request.param.split(".", maxsplit=1)[0]
        argv = [lab_programs.path("spin"), "--mode", "one", "--ms", "20", "--beat", str(folder / "beat")]
        subprocess.run([*argv, "--image", str(lab_programs.image)], env=env, check=True, timeout=DEADLINE_S)
    return request.param, [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


def replay(driver, lines, folder):
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "valve_tools.gpu.command", "replay", str(path), "--driver", driver]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=DEADLINE_S, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_every_line_is_as_documented(trace):
    _, lines = trace
    schema = json.loads((Path(valve_tools.gpu.__file__).parent / "ioctl.schema.json").read_text())

    validator = Draft202012Validator(schema)
    assert [error.message for line in lines for error in validator.iter_errors(line)] == []
    assert {"open", "rm", "uvm", "close"} >= {line["call"] for line in lines} >= {"open", "rm", "uvm"}


def test_a_trace_of_the_emulated_gpu_finds_no_difference_on_it(trace, tmp_path):
    driver, lines = trace

    code, output = replay(driver, lines, tmp_path)

    assert "0 answered otherwise" in output
    assert code == 0
    issued = int(output.split(maxsplit=1)[0])
    assert issued > 40


def test_an_answer_that_hardware_gave_otherwise_is_named(trace, tmp_path):
    driver, lines = trace
    changed = [dict(line) for line in lines]
    channel = next(line for line in changed if line.get("class") == 0xC86F)
    channel["status"] = 0x1B
    unknown = dict(next(line for line in changed if line.get("op") == "control"))
    unknown["cmd"] = 0x20801234
    unknown["arg"] = unknown["arg"][:16] + (0x20801234).to_bytes(4, "little").hex() + unknown["arg"][24:]
    unknown["status"] = 0
    last = next(i for i, line in enumerate(changed) if line.get("op") == "free")

    code, output = replay(driver, [*changed[:last], unknown, *changed[last:]], tmp_path)

    assert code == 1
    assert "alloc class 0xc86f: recorded status 0x1b, emulated status 0x0" in output
    assert "control 0x20801234: recorded status 0x0, emulated status 0x56" in output
    assert "2 answered otherwise" in output

"""`valve tune` over the weights of an engine's weight daemon, asked as a client of a real vLLM and a real SGLang asks.

There is no card here: where the daemon would export CUDA IPC handles it exports shared memory of the CPU. So everything
is run but the opening of a handle on a card.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
HERE = Path(__file__).resolve().parent
NAMES = {"vllm": "vllm_weight_cache_0.sock", "sglang": "sglang_weight_cache_0.sock"}


@pytest.fixture(scope="module", params=[pytest.param("vllm", marks=pytest.mark.quick), "sglang"])
def seen(request, engines, tmp_path_factory):
    """What one training process saw of one played daemon."""
    if request.param == "sglang" and not (engines.folder / "stubs").is_dir():
        pytest.skip("SGLang is not installed: make test-engines")
    folder = tmp_path_factory.mktemp(request.param)
    folder.chmod(0o700)
    draw = random.Random(3)
    rows = [{"text": " ".join(f"t{3 + draw.randrange(900)}" for _ in range(24))} for _ in range(16)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = engines.environment(
        engines.tune,
        engines.folder / "stubs",
        VALVE_ROLE="",
        VALVE_RUN_DIR=str(folder),
        OMP_NUM_THREADS="1",
        VLLM_PLUGINS="",
        SGLANG_PLUGINS="none",
        XDG_STATE_HOME=str(folder / "state"),
    )
    with (folder / "daemon.log").open("wb") as log:
        argv = [engines.python, HERE / "weight_daemon.py", request.param, engines.model, folder / NAMES[request.param]]
        daemon = subprocess.Popen(
            [*map(str, argv), str(folder)], env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        while not (folder / NAMES[request.param]).exists():
            assert daemon.poll() is None, (folder / "daemon.log").read_text()[-3000:]
            time.sleep(0.1)
        start = int(Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()[19])
        service = {"id": 7, "name": "chat", "shares": True, "processes": [[daemon.pid, start]]}
        (folder / "weights.json").write_text(json.dumps({"services": [service]}))
        argv = [engines.python, HERE / "shared_training.py", engines.model, folder / "train.jsonl", folder, daemon.pid]
        done = subprocess.run([str(each) for each in argv], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:] + (folder / "daemon.log").read_text()[-2000:]
        return json.loads(done.stdout.splitlines()[-1])
    finally:
        if daemon.poll() is None:
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()


def test_an_adapter_trained_over_shared_weights_is_that_of_an_own_copy_byte_for_byte(seen):
    assert seen["same bytes"]


def test_no_copy_is_made_and_the_mapping_is_the_daemons_own_memory(seen):
    assert seen["one matrix"]
    assert seen["in shared memory"].startswith("rw-s ")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("tensor parallel", "several GPUs"),
        ("pipeline", "several GPUs"),
        ("quantized", "quantized"),
        ("type", "dtype"),
        ("base", "another base than --model"),
        ("version", "environment"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name_before_a_handle_is_opened(seen, fault, said):
    assert seen["refused"][fault].startswith("share_weights: ")
    assert said in seen["refused"][fault]


def test_consent_that_is_taken_back_ends_the_job_at_its_next_tile_and_costs_no_byte(seen):
    assert "service 7" in seen["withdrawn"]
    assert "does not consent" in seen["withdrawn"]
    assert seen["same bytes after it"]


def test_a_job_under_which_one_word_of_the_weights_changed_is_never_kept(seen):
    assert seen["words that changed"] == 1
    assert "the shared weights changed while the job ran" in seen["altered"]
    assert seen["kept of it"] == "None"


def test_a_job_ends_before_the_next_tile_when_the_daemon_is_gone(seen):
    assert "has ended" in seen["dead"]


def test_a_stray_write_of_a_trainer_that_was_killed_is_never_left_unsaid(seen):
    assert "as they were" in seen["killed"]
    assert "THE WEIGHTS OF chat HAVE CHANGED" in seen["killed by a stray write"]
    assert "holds other weights than when this job began" in seen["gone on after it"]

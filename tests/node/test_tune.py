"""A training job whose stash is memory of the pool: an online service takes it, and no byte of the adapter changes.

Real are valved, the shim, the hook and the trainer. The card and its memory are the emulator's: torch computes on the
CPU in that memory, each tile as a kernel that the gate stops. Needs an environment that can train (make test-tune).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from kv_rig import Engines, check_online, config
from valve_tools.demo import tune_program

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("VALVE_TUNE_PYTHON", ROOT / ".venv-tune" / "bin" / "python"))
WORKLOAD = ROOT / "tests" / "support" / "card" / "tune_workload.py"
STEPS = 12
STASH_MIB = 8  # an online cache is backed whole first (32 MiB): for that it takes all of the pool
ADAPTER = "adapter_model.safetensors"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no environment that can train")


class Beside(Engines):
    """The online one; what trains beside it has other blocks than the demo's engines."""

    def engine(self, role: str):
        return super().engine(role) if role == "online" else None


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tiny base, its data, and the adapter of a run that nobody disturbed, in memory of its own."""
    folder = tmp_path_factory.mktemp("tune")
    program = [PYTHON, tune_program.__file__]
    subprocess.run([*program, "make", folder], check=True)
    state = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    subprocess.run([*program, "train", folder, folder / "calm", str(STEPS)], check=True, env=state)
    return folder


@pytest.mark.parametrize(
    ("remap", "tile", "resident"), [("sparse", 7, 0), ("helper", 19, 0), ("cooperative", 12, 0), ("sparse", 12, 3)]
)
def test_a_reclaim_during_training_costs_one_micro_batch_and_changes_no_byte(
    make_node, tmp_path, base, remap, tile, resident
):
    """With `resident` layers of the base lie in the pool too."""
    for name in ("base", "train.jsonl"):
        (tmp_path / name).symlink_to(base / name)
    node = make_node(config=config(pool_mib=32, remap=remap))
    engines = Beside(node)
    argv = [PYTHON, WORKLOAD, tmp_path, tmp_path / "mine", STEPS, 200, STASH_MIB, tile, resident]
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    trainer = node.run("offline", [str(each) for each in argv], name="tune", env=env, out=tmp_path / "tune.out")

    def said() -> str:
        assert trainer.poll() in (None, 0), (tmp_path / "tune.out").read_text()[-2000:]
        return (tmp_path / "tune.out").read_text()

    node.wait_for(lambda: "paused" in said(), "it is paused inside a micro-batch")
    engines.start_online([(0.5, 1200, 60)])
    check_online(engines.summary(engines.online, "online"))
    memory = node.status().memory
    assert memory.reclaims >= 1
    (tmp_path / "go").touch()
    node.wait_for(lambda: trainer.poll() is not None, "the job is done")

    assert said().count("lost: micro-batch") == 1
    assert (tmp_path / "mine" / ADAPTER).read_bytes() == (base / "calm" / ADAPTER).read_bytes()
    engines.nothing_is_left()


def test_what_was_trained_is_in_the_receipt(make_node, tmp_path, base):
    for name in ("base", "train.jsonl"):
        (tmp_path / name).symlink_to(base / name)
    node, log = make_node(), tmp_path / "tune.out"
    argv = [PYTHON, WORKLOAD, tmp_path, tmp_path / "mine", STEPS, 200, 0, 101, 0]
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    trainer = node.run("offline", [str(each) for each in argv], name="tune", env=env, out=log)
    node.wait_for(lambda: "paused" in log.read_text(), "it is paused in a later step")
    lines = [json.loads(line) for line in (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()]
    trained = sum(line["tokens"] for line in lines if line["kind"] == "step")
    assert trained > 0

    def receipt() -> int:
        return sum(each.useful_tokens for each in node.status().services if each.name == "tune")

    node.wait_for(lambda: receipt() == trained, "valved has read it")
    (tmp_path / "go").touch()
    node.wait_for(lambda: trainer.poll() is not None, "the job is done")
    assert trainer.returncode == 0

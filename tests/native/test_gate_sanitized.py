"""The gate's threads under the sanitizers: tests/native/race.c, one process per seed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from gates import compile_c

FLAGS = {
    "thread": ["-fsanitize=thread", "-O1", "-g"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"],
}
SEEDS = (1, 20261, 77)


@pytest.fixture(scope="module", params=sorted(FLAGS))
def race(request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("race") / f"race-{request.param}"
    native = sorted((repository / "valved/native").rglob("*.c"))
    ours = [repository / "tests/native" / name for name in ("race.c", "fake_rm.c")]
    compile_c(out, native + ours, *FLAGS[request.param])
    return out


@pytest.mark.sanitizer
@pytest.mark.parametrize("hangs", [(), ("hangs",)], ids=["", "hangs"])
@pytest.mark.parametrize("seed", SEEDS)
def test_threads_of_the_gate_never_race_and_leave_nothing_off(race: Path, seed: int, hangs: tuple[str, ...]) -> None:
    """Any report of the sanitizer, any ring unheard, any channel left off, and any leak ends it with a status."""
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "LD_PRELOAD": ""}
    command = [str(race), str(seed), "400", *hangs]

    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    assert done.returncode == 0, done.stdout + done.stderr[-6000:]

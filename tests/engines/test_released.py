"""vLLM's own scheduler tests, from its source archive: with the integration loaded they end as they do without."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
CORE = "tests/v1/core"
SUITES = ["test_scheduler.py", "test_async_scheduler.py", "test_priority_scheduler_random.py"]
NEEDED = (f"{CORE}/", "tests/v1/kv_connector/", "tests/v1/__init__.py", "tests/__init__.py", "tests/utils.py")
LEFT_OUT = "not ec_connector and not mm_ and not multimodal and not encoder"  # their models would be downloaded
OPT = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "dtype": "float16", "max_position_embeddings": 2048}


@pytest.fixture(scope="module")
def checkout(engines, tmp_path_factory):
    """The tests, and beside them a folder with the name of the model that they ask for."""
    archives = sorted((engines.folder / "sources").glob("vllm-*.tar.gz"))
    if not archives:
        pytest.skip("vLLM's source archive is not downloaded: make test-engines")
    folder = tmp_path_factory.mktemp("released")
    with tarfile.open(archives[0]) as archive:
        for member in archive:
            _, _, path = member.name.partition("/")
            if member.isfile() and path.startswith(NEEDED) and not path.endswith("conftest.py"):
                member.name = path
                archive.extract(member, folder, filter="data")
    model = folder / "facebook" / "opt-125m"
    shutil.copytree(engines.model, model, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    (model / "config.json").write_text(json.dumps(OPT))
    return folder


def outcomes(engines, checkout, **variables):
    """({test: how it ended}, how many schedulers the hook attached to)."""
    quiet = ["-q", "-rA", "-p", "no:cacheprovider", "-W", "ignore"]
    argv = [engines.python, "-m", "pytest", *quiet, "-p", "vllm_released", "-k", LEFT_OUT]
    argv += [f"{CORE}/{suite}" for suite in SUITES]
    env = engines.environment(VLLM_LOGGING_LEVEL="ERROR", **variables)
    done = subprocess.run(argv, cwd=checkout, env=env, capture_output=True, text=True, timeout=1000, check=False)
    found = dict(reversed(pair) for pair in re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE))
    attached = re.search(r"^attached (\d+)$", done.stdout, re.MULTILINE)
    assert attached is not None, done.stdout[-2000:] + done.stderr[-2000:]
    return found, int(attached[1])


def test_vllms_own_scheduler_tests_end_as_without_the_integration(engines, checkout):
    plain, _ = outcomes(engines, checkout, VALVE_TEST_PLAIN="1")
    ours, attached = outcomes(engines, checkout)
    passed = [name for name, how in plain.items() if how == "PASSED"]
    print(f"\n{len(passed)} of {len(plain)} pass without the integration; with it the hook attached {attached} times")

    assert len(passed) > 100
    assert attached > 50
    assert {name: ours.get(name) for name in passed} == dict.fromkeys(passed, "PASSED")

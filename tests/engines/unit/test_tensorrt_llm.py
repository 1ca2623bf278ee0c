"""TensorRT-LLM's executor, by stand-ins: it reports open requests and nothing else, and the patch is six lines."""

from __future__ import annotations

import queue
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from kv_node import KvNode, wait_for
from valve_hook import link
from valve_hook.tensorrt_llm import calls

PATCH = Path(__file__).resolve().parents[3] / "patches" / "tensorrt_llm" / "executor.patch"
RELEASES = ("garbage collection profiling", "PyTorch profiler tracing")  # what follows the first anchor: 1.1, newest
ANCHORS = """\
# Format: "start1-stop1,start2-stop2,..." or single iterations "iter1,iter2,..."
PROFILE_START_STOP_ENV_VAR_NAME = "TLLM_PROFILE_START_STOP"

# Environment variable to enable {}.


def nvtx_range(_):
    return lambda function: function


class PyExecutor:
    @nvtx_range("_schedule")
    def _schedule(self):
        scheduler_output = self.scheduler.schedule_request(
            self.active_requests, self.inflight_req_ids)
        return scheduler_output
"""


class Executor:
    """What calls.py looks at."""

    def __init__(self):
        self.active_requests = []
        self.request_queue = queue.Queue()


@pytest.fixture
def node(tmp_path, monkeypatch):
    node = KvNode(tmp_path)
    monkeypatch.setenv("VALVE_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(link, "_links", {})
    yield node
    for each in link._links.values():
        each.close()
    node.stop()


def test_open_requests_are_counted_and_memory_is_left_alone(node):
    executor = Executor()
    calls.count(executor)
    wait_for(lambda: node.hellos, "connected")
    executor.active_requests += [SimpleNamespace(), SimpleNamespace()]
    executor.request_queue.put(object())
    wait_for(lambda: (calls.count(executor), node.region()["open"] == 3)[1], "three are open")

    assert node.attached == ()


def test_an_executor_that_ran_dry_is_seen_without_a_call(node):
    """It blocks for new requests before it would schedule again."""
    executor = Executor()
    executor.active_requests.append(SimpleNamespace())
    calls.count(executor)
    wait_for(lambda: (calls.count(executor), node.hellos and node.region()["open"] == 1)[1], "one is open")
    executor.active_requests.clear()
    wait_for(lambda: node.region()["open"] == 0, "none is open")

    assert node.region()["ended"] == 1


class Queue:
    """ExecutorRequestQueue of 1.1 and 1.2 keeps what waits, too; the newest leaves it to the executor."""

    def __init__(self, size, waiting=None):
        self.get_request_queue_size = lambda: size
        if waiting is not None:
            self.waiting_queue = waiting


@pytest.mark.parametrize(
    ("executor", "expected"),
    [
        (SimpleNamespace(request_queue=SimpleNamespace(qsize=lambda: 2)), 2),
        (SimpleNamespace(executor_request_queue=Queue(2, waiting=[1, 2, 3])), 5),
        (SimpleNamespace(executor_request_queue=Queue(2), waiting_queue=[1]), 3),
    ],
)
def test_requests_that_wait_are_found_where_each_release_keeps_them(executor, expected):
    assert calls.queued(executor) == expected


def test_an_executor_of_another_shape_goes_on_and_says_so_once(node, monkeypatch, caplog):
    monkeypatch.setattr(calls, "_has_failed", False)
    other = type("Other", (), {"active_requests": []})()
    for _ in range(3):
        calls.count(other)

    assert caplog.text.count("the engine goes on") == 1
    assert [each.on_tick for each in link._links.values()] == [None]


@pytest.mark.parametrize("release", RELEASES)
def test_the_patch_adds_six_lines_and_what_it_makes_calls_the_hook(tmp_path, release):
    """Against lines of the same text as the sources have; the sources themselves cannot be installed here."""
    added = [line for line in PATCH.read_text().splitlines() if line.startswith("+") and not line.startswith("+++")]
    target = tmp_path / "tensorrt_llm/_torch/pyexecutor/py_executor.py"
    target.parent.mkdir(parents=True)
    target.write_text(ANCHORS.format(release))
    subprocess.run(["patch", "-p1", "-s", "-i", str(PATCH)], cwd=tmp_path, check=True)
    names: dict[str, object] = {}
    exec(target.read_text(), names)
    seen = []
    names["valve"] = SimpleNamespace(count=seen.append)
    executor = names["PyExecutor"]()
    executor.active_requests, executor.inflight_req_ids = [1], set()
    executor.scheduler = SimpleNamespace(schedule_request=lambda active, _: list(active))

    assert executor._schedule() == [1]
    assert seen == [executor]
    assert len(added) == 6

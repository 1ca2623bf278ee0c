"""A server that loads, unloads and streams as vLLM or SGLang do; loading holds all decoding up for as long as told."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeEngine:
    def __init__(
        self, kind: str = "vllm", *, load_s: float = 0.0, token_s: float = 0.002, updating: bool = True
    ) -> None:
        self.kind, self.load_s, self.token_s, self.updating = kind, load_s, token_s, updating
        self.adapters: dict[str, str] = {}
        self.seen_paths: list[str] = []
        self.decoding = threading.Lock()
        self.lies = False
        engine = self

        class Answers(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def say(self, body: Any, status: int = 200) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                own = {"id": "base", "owned_by": engine.kind}
                self.say({"data": [own, *({"id": name, "parent": "base"} for name in engine.adapters)]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prefix = "" if engine.kind == "sglang" else "/v1"
                if self.path == "/v1/completions":
                    self.complete(body)
                elif not engine.updating:
                    self.say({"detail": "Not Found"}, 404)
                elif self.path == f"{prefix}/load_lora_adapter":
                    self.load(body)
                elif self.path == f"{prefix}/unload_lora_adapter":
                    del engine.adapters[body["lora_name"]]
                    self.say({"success": True})
                else:
                    self.say({"detail": "Not Found"}, 404)

            def load(self, body: dict[str, str]) -> None:
                if body["lora_path"] in engine.seen_paths or body["lora_name"] in engine.adapters:
                    self.say({"message": "stale"}, 400)
                    return
                with engine.decoding:
                    time.sleep(engine.load_s)
                engine.seen_paths.append(body["lora_path"])
                engine.adapters[body["lora_name"]] = body["lora_path"]
                self.say({"success": True})

            def complete(self, body: dict[str, Any]) -> None:
                if not body.get("stream"):
                    self.say({"model": "base" if engine.lies else body["model"], "choices": []})
                    return
                self.send_response(200)
                self.end_headers()
                for _ in range(body["max_tokens"]):
                    with engine.decoding:
                        time.sleep(engine.token_s)
                    self.wfile.write(b'data: {"choices": []}\n\n')
                self.wfile.write(b"data: [DONE]\n\n")

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

"""A server that loads, unloads and streams as vLLM or SGLang do; loading holds all decoding up for as long as told."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN_S = 0.002
Away = dict[str, tuple[int, str]]


def point_away(request: BaseHTTPRequestHandler, away: Away) -> bool:
    """Whether this request was answered by a place elsewhere."""
    if request.path not in away:
        return False
    status, to = away[request.path]
    request.send_response(status)
    request.send_header("Location", to + request.path)
    request.send_header("Content-Length", "0")
    request.send_header("Connection", "close")
    request.end_headers()
    request.close_connection = True
    return True


class FakeEngine:
    port, base = 0, "base"  # another server may come under the same port, for another base

    def __init__(
        self, kind: str = "vllm", *, load_s: float = 0.0, updating: bool = True, key: str = "", away: Away | None = None
    ) -> None:
        """`away`: a path -> how and to which server it is redirected."""
        self.kind, self.load_s, self.updating = kind, load_s, updating
        self.adapters, self.lies = dict[str, str](), False
        self.seen_paths, self.requests = list[str](), list[str]()
        self.answered = list[str]()  # by which adapter; "" and "base": by none
        self.decoding = threading.Lock()
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

            def parse_request(self) -> bool:
                """Nothing is answered without the key, as with --api-key."""
                if not super().parse_request():
                    return False
                engine.requests.append(self.path)
                if point_away(self, away or {}):
                    return False
                if key and self.headers["Authorization"] != f"Bearer {key}":
                    self.say({"error": "Unauthorized"}, 401)
                    return False
                return True

            def do_GET(self) -> None:
                own = {"id": engine.base, "owned_by": engine.kind, "root": f"/models/{engine.base}"}
                self.say({"data": [own, *engine.listed()]})

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
                known = engine.knows(body["model"])
                if not known or not body.get("stream"):
                    self.say({"model": "base" if engine.lies else body["model"], "choices": []}, 200 if known else 400)
                    return
                self.send_response(200)
                self.end_headers()
                for _ in range(body["max_tokens"]):
                    with engine.decoding:
                        time.sleep(TOKEN_S)
                    self.wfile.write(b'data: {"choices": []}\n\n')
                self.wfile.write(b"data: [DONE]\n\n")

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Answers)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def listed(self) -> list[dict[str, str]]:
        return [{"id": name, "parent": self.base, "root": path} for name, path in self.adapters.items()]

    def knows(self, model: str) -> bool:
        adapter = model.partition(":")[2] if self.kind == "sglang" else model
        self.answered.append(adapter)
        return adapter in ("", "base", *self.adapters)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

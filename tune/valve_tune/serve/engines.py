"""A running vLLM or SGLang over HTTP, as far as publishing needs it: load, unload, answer, and a stream to watch."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

ANSWER_S = 300.0  # a large adapter from slow storage takes its time
LIST_S = 5.0  # an engine that is well says at once what it has
PROMPT = [1, 2, 3]  # token ids: no tokenizer need know a word
REDIRECTS = (301, 302, 303, 307, 308)
RUNTIME = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, SGLang with --enable-lora"

TOKEN = "name the file with the service's key: --token-file FILE"


class EngineError(Exception):
    """What the engine answered, or that it did not."""


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib would send the key on to wherever an answer points, and the order as a plain question."""

    def redirect_request(self, *_: Any) -> None:
        return None


class RunningEngine:
    def __init__(self, url: str, token: str = "") -> None:
        """`token` is what the service was started with (--api-key), if it was."""
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        self.url = url.rstrip("/").removesuffix("/v1")
        self._opener = urllib.request.build_opener(NoRedirect)
        if not self.url.startswith(("http://", "https://")):
            raise EngineError(f"{url}: must begin with http:// or https://")
        bases = [entry for entry in self._models() if not entry.get("parent")]
        if not bases:
            raise EngineError(f"{url}: names no model")
        self.base, self.root = str(bases[0]["id"]), str(bases[0].get("root") or "")
        self.kind = "sglang" if bases[0].get("owned_by") == "sglang" else "vllm"
        self._prefix = "" if self.kind == "sglang" else "/v1"

    def _models(self) -> list[dict[str, Any]]:
        try:
            found = list(json.loads(self._ask("/v1/models", wait_s=LIST_S))["data"])
            if all(isinstance(entry["id"], str) for entry in found):
                return found
        except (ValueError, KeyError, TypeError):
            pass
        raise EngineError(f"{self.url}/v1/models: no list of models")

    def _open(self, path: str, body: dict[str, Any] | None = None, wait_s: float = ANSWER_S) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self._headers)
        try:
            return self._opener.open(request, timeout=wait_s)
        except urllib.error.HTTPError as error:
            if error.code in REDIRECTS:
                raise EngineError(f"{self.url}{path}: points to {error.headers['Location']}; name that one") from None
            said = error.read(2000).decode(errors="replace")
            more = {404: f"; {RUNTIME}", 401: f"; {TOKEN}", 403: f"; {TOKEN}"}.get(error.code, "")
            raise EngineError(f"{self.url}{path}: {error.code} {said}{more}") from None
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{self.url}{path}: {error or type(error).__name__}") from None

    def _ask(self, path: str, body: dict[str, Any] | None = None, wait_s: float = ANSWER_S) -> str:
        with self._open(path, body, wait_s) as answer:
            try:
                return str(answer.read().decode(errors="replace"))
            except (OSError, http.client.HTTPException) as error:
                raise EngineError(f"{self.url}{path}: broke off: {type(error).__name__}") from None

    def load(self, name: str, path: str) -> None:
        said = self._ask(f"{self._prefix}/load_lora_adapter", {"lora_name": name, "lora_path": path})
        if self.kind == "sglang" and self._field(said, "success") is False:
            raise EngineError(f"{self.url}: {said}")

    def _field(self, said: str, name: str) -> Any:
        try:
            return json.loads(said).get(name)
        except (ValueError, AttributeError, TypeError):
            raise EngineError(f"{self.url}: answers what is no JSON object: {said[:200]}") from None

    def unload(self, name: str) -> None:
        self._ask(f"{self._prefix}/unload_lora_adapter", {"lora_name": name})

    def loaded(self) -> dict[str, str]:
        """The names of its adapters, and where it has each from; empty: it does not say."""
        others = (entry for entry in self._models() if entry.get("parent") or entry["id"] != self.base)
        return {str(entry["id"]): str(entry.get("root") or "") for entry in others}

    def path_of(self, name: str) -> str:
        """Where it has this adapter from; empty: it does not say."""
        return next((str(entry.get("root") or "") for entry in self._models() if entry["id"] == name), "")

    def model_of(self, name: str) -> str:
        """What a client asks for. Under the bare name of an adapter SGLang answers as the base and says that name."""
        return f"{self.base}:{name}" if self.kind == "sglang" else name

    def answer(self, model: str) -> str:
        """One token from this model; the name that the answer gives."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        return str(self._field(self._ask("/v1/completions", body), "model"))

    def stream(self, tokens: int) -> Iterator[float]:
        """When each piece of one answer of the base came."""
        body = {"model": self.base, "prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        with self._open("/v1/completions", body) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield time.monotonic()

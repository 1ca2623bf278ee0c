"""Plays an OpenAI-shaped engine as a process of its own: `python played_engine.py PORT [--piece-s S]`.

An answer streams `max_tokens` pieces "NAME:PROMPT:INDEX". It counts what it began, ended and saw given up (/played).
With --strict it answers 404 to a model that it has not, as vLLM does, or 400 with --kind sglang. /play changes how it
behaves: {"listing": 500}, {"loading": 200}. What it was loaded with dies with it, as with an engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal

from aiohttp import web

PLAYED = {
    "begun": 0,
    "ended": 0,
    "given_up": 0,
    "asked": 0,
    "loaded": [],
    "headers": {},
    "models": [],
    "looks": 0,
    "refused": 0,
}
PLAYS = {"listing": 200, "loading": 200, "base": "base"}


async def complete(request):
    asked = await request.json()
    PLAYED["begun"] += 1
    PLAYED["headers"] = dict(request.headers)
    PLAYED["models"].append(asked.get("model"))
    if request.app["strict"] and asked.get("model") not in known(request.app["kind"]):
        error = {"error": f"there is no {asked.get('model')}"}
        return web.json_response(error, status=400 if request.app["kind"] == "sglang" else 404)
    if asked.get("die") == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if asked.get("status"):
        return web.json_response({"error": "played"}, status=asked["status"])
    name, count = request.app["name"], asked.get("max_tokens", 3)
    try:
        if not asked.get("stream"):
            await asyncio.sleep(request.app["piece_s"])
            if asked.get("held"):
                await request.app["released"].wait()
            PLAYED["ended"] += 1
            answer = web.json_response({"text": asked["prompt"], "from": name, "model": asked.get("model")})
            answer.set_cookie("session", asked["prompt"][:20])
            return answer
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for index in range(count):
            await answer.write(f"data: {name}:{asked['prompt']}:{index}\n\n".encode())
            if asked.get("die") == index:
                os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(asked.get("piece_s", request.app["piece_s"]))
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        PLAYED["ended"] += 1
        return answer
    except (asyncio.CancelledError, ConnectionError):
        PLAYED["given_up"] += 1
        raise


async def health(request):
    PLAYED["asked"] += 1
    return web.Response(text="ok")


async def release(request):
    """Answers that were asked for as held come now."""
    request.app["released"].set()
    return web.Response(text="ok")


def known(kind):
    before = f"{PLAYS['base']}:" if kind == "sglang" else ""
    return {PLAYS["base"], *(before + name for name in PLAYED["loaded"])}


async def models(request):
    """The base, and what was loaded since."""
    PLAYED["looks"] += 1
    base = PLAYS["base"]
    loaded = [{"id": name, "parent": base, "root": f"/adapters/{name}"} for name in PLAYED["loaded"]]
    own = {"id": base, "owned_by": request.app["kind"], "root": f"/models/{base}"}
    return web.json_response({"data": [own, *loaded]}, status=PLAYS["listing"])


async def load(request):
    asked = await request.json()
    if request.content_type != "application/json":
        return web.Response(status=415)
    if PLAYS["loading"] != 200:
        PLAYED["refused"] += 1
        return web.Response(status=PLAYS["loading"])
    if asked["lora_name"] in PLAYED["loaded"]:
        return web.Response(status=400)
    PLAYED["loaded"].append(asked["lora_name"])
    return web.Response(text="ok")


async def unload(request):
    PLAYED["loaded"].remove((await request.json())["lora_name"])
    return web.Response(text="ok")


async def play(request):
    PLAYS.update(await request.json())
    return web.Response(text="ok")


async def played(request):
    return web.Response(text=json.dumps(PLAYED))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--piece-s", type=float, default=0.0)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--kind", default="vllm")
    parser.add_argument("--base", default="base")
    parser.add_argument("--loading", type=int, default=200)
    arguments = parser.parse_args()
    PLAYS.update(base=arguments.base, loading=arguments.loading)
    app = web.Application(client_max_size=64 << 20)
    app["name"], app["piece_s"], app["released"] = str(arguments.port), arguments.piece_s, asyncio.Event()
    app["strict"], app["kind"] = arguments.strict, arguments.kind
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    before = "" if arguments.kind == "sglang" else "/v1"
    app.router.add_post(f"{before}/load_lora_adapter", load)
    app.router.add_post(f"{before}/unload_lora_adapter", unload)
    app.router.add_post("/play", play)
    app.router.add_post("/abort_request", complete)
    app.router.add_get("/played", played)
    app.router.add_post("/release", release)
    web.run_app(app, host="127.0.0.1", port=arguments.port, handler_cancellation=True, print=None)


if __name__ == "__main__":
    main()

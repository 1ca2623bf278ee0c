"""Plays an OpenAI-shaped engine as a process of its own: `python played_engine.py PORT [--piece-s S]`.

An answer streams `max_tokens` pieces "NAME:PROMPT:INDEX". It counts what it began, ended and saw given up (/played).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal

from aiohttp import web

PLAYED = {"begun": 0, "ended": 0, "given_up": 0, "asked": 0, "loaded": [], "headers": {}}


async def complete(request):
    asked = await request.json()
    PLAYED["begun"] += 1
    PLAYED["headers"] = dict(request.headers)
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


async def models(request):
    """The base, and what was loaded since."""
    loaded = [{"id": name, "parent": "base"} for name in PLAYED["loaded"]]
    return web.json_response({"data": [{"id": "base", "owned_by": "vllm"}, *loaded]})


async def load(request):
    PLAYED["loaded"].append((await request.json())["lora_name"])
    return web.Response(text="ok")


async def played(request):
    return web.Response(text=json.dumps(PLAYED))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--piece-s", type=float, default=0.0)
    arguments = parser.parse_args()
    app = web.Application(client_max_size=64 << 20)
    app["name"], app["piece_s"], app["released"] = str(arguments.port), arguments.piece_s, asyncio.Event()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/load_lora_adapter", load)
    app.router.add_post("/abort_request", complete)
    app.router.add_get("/played", played)
    app.router.add_post("/release", release)
    web.run_app(app, host="127.0.0.1", port=arguments.port, handler_cancellation=True, print=None)


if __name__ == "__main__":
    main()

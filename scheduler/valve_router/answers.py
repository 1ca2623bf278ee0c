"""Checks the token of a request to the router, and makes refusals."""

from __future__ import annotations

import hmac

from aiohttp import web


def is_allowed(request: web.Request, token: str) -> bool:
    given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    return not token or hmac.compare_digest(given, f"Bearer {token}".encode())


def refusal(status: int, message: str, code: str, retry_after_s: int = 0) -> web.Response:
    """An error in the shape that OpenAI's clients read."""
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s else {}
    error = {"error": {"message": message, "type": "valve_router", "code": code}}
    return web.json_response(error, status=status, headers=headers)

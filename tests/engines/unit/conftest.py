"""Fixtures that several files share."""

from __future__ import annotations

from sglang_world import world

__all__ = ["world"]

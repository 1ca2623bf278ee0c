"""Moves KV memory between online services and offline jobs: ranges, engines, pool, reclaim, lending."""

"""A ledger of one fleet job, and what its blobs hold."""

from __future__ import annotations

from valve_router.training.ledger import FleetBooks
from valve_router.training.records import Push

BATCHES = 12


def begin(folder, rounds=2, batches=BATCHES, silent_s=60.0, limit_s=0.0):
    ledger = FleetBooks(folder, silent_s)
    ledger.add_job("j", rounds=rounds, round_batches=batches, digest="d", tokens=100, limit_s=limit_s, now_s=0.0)
    return ledger


def push(ledger, joined, numbers, tokens, steps=1, content=b"", now=1.0):
    one = Push(numbers=numbers, tokens=tokens, steps=steps, blob=content or f"{joined.trainer}/{tokens}".encode())
    return ledger.push("j", joined.trainer, joined.version, one, now)


def blobs(folder):
    return sorted(path.read_bytes() for path in (folder / "blobs").iterdir())

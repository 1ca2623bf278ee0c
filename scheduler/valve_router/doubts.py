"""Judges an answer that may say that an engine lost an adapter, or only that its client was wrong."""

from __future__ import annotations

from valve_router.checkups import ModelLooks
from valve_router.replicas import Replicas, Sent

DOUBTED = frozenset({400, 404})  # vLLM answers 404 to a model that it has not, SGLang 400


class Lacking(Exception):
    """The replica has not what is asked for, whatever it said before. It has not begun."""


async def has_changed(status: int, model: str, sent: Sent, replicas: Replicas, looks: ModelLooks) -> bool:
    """Whether the replica has by now what it had not, or a newer version: then it may be asked once more. False: the
    answer is the client's own."""
    held = sent.replica.adapters
    if replicas.is_published(model):
        has_said = await looks.again(sent.replica)
        if not replicas.is_published(model):  # the last one was unloaded: the engine's answer is right
            return False
    elif status == 404 and model:  # it may have been published just now
        await looks.everybody()
        has_said = replicas.is_published(model)
    else:
        return False
    if not has_said and (status == 400 or not replicas.is_published(model)) and held.losses == sent.losses:
        return False
    now = held.asks(model) if has_said else None
    if now is None or (sent.is_second and now != sent.version):
        raise Lacking
    return now != sent.version or (status == 404 and not sent.is_second)

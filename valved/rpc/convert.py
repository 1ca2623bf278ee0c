"""Model values to protobuf messages. Field names are the same on both sides, so one walk serves every message."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from valve.v1 import node_pb2

from valved.model.events import Event
from valved.model.ids import Mode, Role

MODE_OF = {node_pb2.MODE_OFF: Mode.OFF, node_pb2.MODE_OBSERVE: Mode.OBSERVE, node_pb2.MODE_HARVEST: Mode.HARVEST}
MODE_TO = {mode: number for number, mode in MODE_OF.items()}


def fill(message: Any, value: Any) -> Any:
    """Copy each field of a dataclass into the message's field of the same name."""
    for item in dataclasses.fields(value):
        _set(message, item.name, getattr(value, item.name))
    return message


def _set(message: Any, name: str, value: Any) -> None:
    if dataclasses.is_dataclass(value):
        fill(getattr(message, name), value)
    elif isinstance(value, Mapping):
        getattr(message, name).update(value)
    elif isinstance(value, tuple):
        target = getattr(message, name)
        for item in value:
            if dataclasses.is_dataclass(item):
                fill(target.add(), item)
            else:
                target.append(item)
    elif value is not None:  # an optional field that nobody can fill yet
        setattr(message, name, _scalar(value))


def _scalar(value: Any) -> Any:
    if isinstance(value, Mode):
        return MODE_TO[value]
    return int(value) if isinstance(value, enum.IntEnum) else value


def event(value: Event, lost: int = 0) -> Any:
    return node_pb2.Event(
        seq=value.seq,
        t_ns=value.t_ns,
        kind=value.kind.value,
        service=value.service,
        client=value.client,
        gpus=value.gpus,
        reason=value.reason,
        detail={name: str(inner) for name, inner in value.detail.items()},
        lost=lost,
    )


def role(value: int) -> Role:
    return Role(value) if value in set(Role) else Role.NONE

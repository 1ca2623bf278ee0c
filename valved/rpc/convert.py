"""Model values to protobuf messages. Field names are the same on both sides, so one walk serves every message."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from valve.v1 import node_pb2

from valved.model.events import Event
from valved.model.ids import Mode, Role

MODE_OF = {node_pb2.MODE_OFF: Mode.OFF, node_pb2.MODE_OBSERVE: Mode.OBSERVE, node_pb2.MODE_HARVEST: Mode.HARVEST}
MODE_TO = {mode: number for number, mode in MODE_OF.items()}


BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


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
                target.append(_fit(message, name, item))
    elif value is not None:  # an optional field that nobody can fill yet
        setattr(message, name, _fit(message, name, _scalar(value)))


def _fit(message: Any, name: str, value: Any) -> Any:
    """A number that its field does not hold must not fail the whole answer."""
    bounds = BOUNDS.get(message.DESCRIPTOR.fields_by_name[name].cpp_type) if type(value) is int else None
    return min(max(value, bounds[0]), bounds[1]) if bounds else value


def _scalar(value: Any) -> Any:
    if isinstance(value, Mode):
        return MODE_TO[value]
    return int(value) if isinstance(value, enum.IntEnum) else value


def event(value: Event, epoch: int, lost: int = 0) -> Any:
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
        epoch=epoch,
    )


def role(value: int) -> Role:
    return Role(value) if value in set(Role) else Role.NONE

"""Model values to protobuf messages. Field names are the same on both sides, so one walk serves every message."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
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


Bounds = tuple[int, int] | None


def fill(message: Any, value: Any) -> Any:
    """Copy each field of a dataclass into the message's field of the same name."""
    kind: Any = type(value)
    for name, bounds in _fields(kind, message.DESCRIPTOR):
        _set(message, name, getattr(value, name), bounds)
    return message


@cache
def _fields(kind: Any, descriptor: Any) -> tuple[tuple[str, Bounds], ...]:
    """With what a number may be. A status has thousands of fields of a few kinds."""
    names = [item.name for item in dataclasses.fields(kind)]
    return tuple((name, _bounds(descriptor.fields_by_name[name])) for name in names)


def _bounds(field: Any) -> Bounds:
    """Of each value, where the field is a map."""
    inner = field.message_type
    is_map = inner is not None and inner.GetOptions().map_entry
    return BOUNDS.get(inner.fields_by_name["value"].cpp_type if is_map else field.cpp_type)


def _set(message: Any, name: str, value: Any, bounds: Bounds) -> None:
    if isinstance(value, (int, str, float)):
        setattr(message, name, _scalar(value, bounds))
    elif isinstance(value, Mapping):
        getattr(message, name).update({key: _scalar(inner, bounds) for key, inner in value.items()})
    elif isinstance(value, tuple):
        target = getattr(message, name)
        for item in value:
            if dataclasses.is_dataclass(item):
                fill(target.add(), item)
            else:
                target.append(_scalar(item, bounds))
    elif dataclasses.is_dataclass(value):
        fill(getattr(message, name), value)
    elif value is not None:  # an optional field that nobody can fill yet
        setattr(message, name, _scalar(value, bounds))


def _scalar(value: Any, bounds: Bounds) -> Any:
    """A number that its field does not hold must not fail the whole answer."""
    if isinstance(value, Mode):
        return MODE_TO[value]
    if isinstance(value, int) and not isinstance(value, bool) and bounds:
        return min(max(int(value), bounds[0]), bounds[1])
    return value


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

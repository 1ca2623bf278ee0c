"""Model values to protobuf messages. Field names are the same on both sides, so one walk serves every message."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache, partial
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
    """Copy each field of a dataclass into the message's field of the same name. Protobuf takes all of them at once: a
    status has thousands, and to set them one by one takes twice the time."""
    message.MergeFrom(type(message)(**_plain(value, message.DESCRIPTOR)))
    return message


def _plain(value: Any, descriptor: Any) -> dict[str, Any]:
    kind: Any = type(value)
    plain = {}
    for name, one in _fields(kind, descriptor):
        given = getattr(value, name)
        if given is None:  # an optional field that nobody can fill yet
            continue
        if one is None:
            plain[name] = given
        elif isinstance(given, tuple):
            plain[name] = [one(item) for item in given]
        elif isinstance(given, Mapping):
            plain[name] = {key: one(item) for key, item in given.items()}
        else:
            plain[name] = one(given)
    return plain


One = Callable[[Any], Any] | None  # what becomes of one value; None: nothing


@cache
def _fields(kind: Any, descriptor: Any) -> tuple[tuple[str, One], ...]:
    return tuple((item.name, _one(descriptor.fields_by_name[item.name])) for item in dataclasses.fields(kind))


def _one(field: Any) -> One:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        return _one(inner.fields_by_name["value"])
    if inner is not None:
        return partial(_plain, descriptor=inner)
    if field.enum_type is not None:
        return lambda value: MODE_TO.get(value, value)
    if (bounds := BOUNDS.get(field.cpp_type)) is None:
        return None
    low, high = bounds  # a number that its field does not hold must not fail the whole answer
    return lambda value: value if low <= value <= high else min(max(value, low), high)


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

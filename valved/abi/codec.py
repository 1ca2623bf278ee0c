"""How the body of one message is read and written: by its layout alone where the fields stand in its order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from valve_abi import Layout


class Malformed(ValueError):
    """The packet makes no sense."""


class Codec(Protocol):
    @property
    def size(self) -> int: ...

    def read(self, packet: bytes, at: int) -> Any: ...

    def write(self, body: Any) -> bytes: ...


class Plain:
    """A body whose fields stand in the order of its layout. Text is a C string, a flag a word."""

    def __init__(self, body: type[msgspec.Struct], layout: Layout, **readers: Callable[[Any], Any]) -> None:
        """`readers`: what to make of the raw value of a field, where its type does not say so."""
        self._body = body
        self._struct = layout.struct()
        self._names = body.__struct_fields__
        found = {name: readers.get(name) or _READERS.get(str(body.__annotations__[name])) for name in self._names}
        self._readers = [(name, reader) for name, reader in found.items() if reader is not None]

    @property
    def size(self) -> int:
        return self._struct.size

    def read(self, packet: bytes, at: int) -> Any:
        fields = dict(zip(self._names, self._struct.unpack_from(packet, at), strict=True))
        for name, reader in self._readers:
            fields[name] = reader(fields[name])
        return self._body(**fields)

    def write(self, body: Any) -> bytes:
        return self._struct.pack(*[_raw(getattr(body, name)) for name in self._names])


def _raw(value: Any) -> Any:
    return value.encode("ascii", "replace") if isinstance(value, str) else value


def _text(raw: bytes) -> str:
    """A C string of a stranger: up to the first NUL, printable ASCII only."""
    return "".join(chr(byte) if 32 <= byte < 127 else "?" for byte in raw.split(b"\0", 1)[0])


_READERS: dict[str, Callable[[Any], Any]] = {"str": _text, "bool": bool}

"""Where the fields of one C structure stand, and how `struct` and numpy read them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_NUMPY = {"H": "<u2", "I": "<u4", "Q": "<u8"}


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its offset and its `struct` code. A nested structure has no code; text leaves out its last NUL."""

    offset: int
    code: str
    bytes: int

    @property
    def format(self) -> str:
        return f"<{self.code}"


@dataclass(frozen=True, slots=True)
class Layout:
    """One structure. Padding has no name and is written as zero."""

    size: int
    fields: Mapping[str, Field] = field(default_factory=lambda: MappingProxyType({}))

    def at(self, name: str) -> int:
        """The offset of a field."""
        return self.fields[name].offset

    def struct(self, first: str = "", last: str = "") -> struct.Struct:
        """The fields from `first` to `last`, padding between them included.

        Without `last` it goes to the end of the structure, or to the first nested one.
        """
        names = list(self.fields)
        begin = names.index(first) if first else 0
        at = self.fields[first].offset if first else 0
        code = "<"
        for name in names[begin:]:
            one = self.fields[name]
            code += "x" * (one.offset - at) + one.code
            at = one.offset + one.bytes * bool(one.code)
            if not one.code or name == last:
                return struct.Struct(code)
        return struct.Struct(code + "x" * (self.size - at))

    def dtype(self) -> Any:
        """What `numpy.dtype` takes: every number by its name."""
        numbers = {name: one for name, one in self.fields.items() if one.code in _NUMPY}
        return {
            "names": list(numbers),
            "formats": [_NUMPY[one.code] for one in numbers.values()],
            "offsets": [one.offset for one in numbers.values()],
            "itemsize": self.size,
        }

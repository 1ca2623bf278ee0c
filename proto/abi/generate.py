"""Generates the Python module of proto/abi/{region,link,kv}.h: `generate.py OUT.py`, called by meson and `make check`.

The headers are the only layouts. pycparser reads them; sizes follow the rules of x86-64 and of every ABI that aligns a
number to its size, which tests/unit/test_abi.py compares with what the C compiler says, field by field.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from pycparser import CParser, c_ast  # type: ignore[import-untyped]

HEADERS = ("region.h", "kv.h", "link.h")
SIZES = {"char": 1, "uint8_t": 1, "uint16_t": 2, "uint32_t": 4, "uint64_t": 8}
CODES = {2: "H", 4: "I", 8: "Q"}
TYPEDEFS = "".join(f"typedef int {name};\n" for name in SIZES if name != "char")
FLAGS = {"valve_feature"}
HEADER_BYTES = 24
"""Of `valve_link_header`, which begins every message; Python packs it apart from the body."""


@dataclass(frozen=True)
class Type:
    bytes: int
    align: int
    code: str = ""


def read_headers(folder: Path) -> tuple[str, dict[str, int]]:
    """The declarations without preprocessor lines, and every number that a macro names."""
    numbers: dict[str, int] = {}
    declarations = ""
    for name in HEADERS:
        text = re.sub(r"/\*.*?\*/", " ", (folder / name).read_text(), flags=re.DOTALL).replace("\\\n", " ")
        for macro, value in re.findall(r"^#define (VALVE_\w+)[ \t]+(\S.*?)\s*$", text, re.MULTILINE):
            numbers[macro] = evaluate(value, numbers)
        text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
        text = re.sub(r"^(_Static_assert|VALVE_\w+\().*$", "", text, flags=re.MULTILINE)
        declarations += re.sub(r"\bVALVE_\w+\b", lambda found: str(numbers.get(found[0], found[0])), text)
    return TYPEDEFS + re.sub(r"\b(\d+)u(ll)?\b", r"\1", declarations), numbers


def evaluate(value: str, numbers: dict[str, int]) -> int:
    """A macro's value: numbers, names of macros and + - * <<."""
    plain = re.sub(r"\b(0x[0-9a-fA-F]+|\d+)u?(?:ll)?\b", r"\1", value)
    plain = re.sub(r"\bVALVE_\w+\b", lambda found: str(numbers[found[0]]), plain)
    if not re.fullmatch(r"[0-9a-fA-Fx+*()<\- ]+", plain):
        raise ValueError(f"not a number: {value}")
    return int(eval(plain))  # numbers and operators only


class Reader:
    """Walks the declarations and writes the module."""

    def __init__(self) -> None:
        self.structs: dict[str, Type] = {}
        self.lines: list[str] = []

    def enum(self, name: str, node: c_ast.Enum) -> None:
        values, last = {}, -1
        for one in node.values.enumerators:
            last = last + 1 if one.value is None else constant(one.value)
            values[one.name] = last
        prefix = common_prefix(list(values))
        kind = "IntFlag" if name in FLAGS else "IntEnum"
        camel = "".join(part.title() for part in name.removeprefix("valve_").split("_"))
        members = [f"    {member.removeprefix(prefix)} = {value}" for member, value in values.items()]
        self.lines += ["", "", f"class {camel}({kind}):", *members]

    def struct(self, name: str, node: c_ast.Struct) -> None:
        total, fields = self.layout(node)
        self.structs[name] = total
        shift = HEADER_BYTES if "header" in fields else 0
        fields.pop("header", None)
        shown = {key: (at - shift, kind) for key, (at, kind) in fields.items() if not re.fullmatch(r"pad\d", key)}
        self.lines += ["", f"{name.removeprefix('valve_').upper()} = Layout(", f"    {total.bytes - shift},", "    {"]
        self.lines += [
            f'        "{key}": Field({at}, "{kind.code}", {kind.bytes}),' for key, (at, kind) in shown.items()
        ]
        self.lines += ["    },", ")"]

    def layout(self, node: c_ast.Struct) -> tuple[Type, dict[str, tuple[int, Type]]]:
        at, widest, fields = 0, 1, {}
        for decl in node.decls:
            kind = self.type_of(decl.type)
            align = max([kind.align, *(constant(one.alignment) for one in decl.align or [])])
            at = -(-at // align) * align
            fields[decl.name] = (at, kind)
            at, widest = at + kind.bytes, max(widest, align)
        return Type(-(-at // widest) * widest, widest), fields

    def type_of(self, node: c_ast.Node) -> Type:
        if isinstance(node, c_ast.ArrayDecl):
            one, count = self.type_of(node.type), constant(node.dim)
            return Type(one.bytes * count, one.align, array_code(node.type, one, count))
        if isinstance(node.type, c_ast.Struct):
            if node.type.decls:
                return self.unnamed(node.type)
            return self.structs[node.type.name]
        size = SIZES[node.type.names[0]]
        return Type(size, size, CODES.get(size, "B"))

    def unnamed(self, node: c_ast.Struct) -> Type:
        """A structure without a name: its numbers, where they are all of one width and nothing lies between them."""
        total, fields = self.layout(node)
        codes = {kind.code for _, kind in fields.values()}
        packed = sum(kind.bytes for _, kind in fields.values()) == total.bytes
        return Type(total.bytes, total.align, f"{len(fields)}{codes.pop()}" if packed and len(codes) == 1 else "")


def array_code(node: c_ast.Node, one: Type, count: int) -> str:
    if not one.code:
        return ""
    if one.bytes > 1:
        return f"{count * int(one.code[:-1] or 1)}{one.code[-1]}"
    return f"{count - 1}sx" if node.type.names == ["char"] else f"{count}s"


def constant(node: c_ast.Node) -> int:
    if isinstance(node, c_ast.BinaryOp):
        left, right = constant(node.left), constant(node.right)
        return {"<<": left << right, "+": left + right, "*": left * right}[node.op]
    return int(node.value, 0)


def common_prefix(names: list[str]) -> str:
    """The words with an underscore that all members begin with: VALVE_NOTE_, or VALVE_KV_ of BACK and TRY."""
    words = [name.split("_") for name in names]
    shared = 0
    while all(len(one) > shared + 1 and one[shared] == words[0][shared] for one in words):
        shared += 1
    return "_".join([*words[0][:shared], ""])


def generate(folder: Path) -> str:
    text, numbers = read_headers(folder)
    reader = Reader()
    for item in CParser().parse(text).ext:
        if isinstance(item, c_ast.Decl) and isinstance(item.type, c_ast.Enum):
            reader.enum(item.type.name, item.type)
        elif isinstance(item, c_ast.Decl) and isinstance(item.type, c_ast.Struct):
            reader.struct(item.type.name, item.type)
    head = [
        '"""What proto/abi/{region,kv,link}.h say. Generated by proto/abi/generate.py; change the headers instead."""',
        "",
        "from enum import IntEnum, IntFlag",
        "",
        "from valve_abi.layout import Field, Layout",
        "",
        *(f"{name.removeprefix('VALVE_')} = {value:#x}" for name, value in numbers.items()),
    ]
    return "\n".join([*head, *reader.lines]) + "\n"


def main() -> int:
    Path(sys.argv[1]).write_text(generate(Path(__file__).resolve().parent))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""valve_abi says what the C compiler says, and nothing that version 0.1 relied on has moved."""

from __future__ import annotations

import json
import re
import subprocess
from enum import Enum
from pathlib import Path

import pytest
import valve_abi
from valve_abi import Layout

from valved.model.ids import Role

ROOT = Path(__file__).resolve().parents[2]
FROZEN = json.loads((ROOT / "tests/golden/abi-0.1.json").read_text())
LAYOUTS = {name: value for name, value in vars(valve_abi).items() if isinstance(value, Layout)}
ENUMS = {
    name: kind for name, kind in vars(valve_abi).items() if isinstance(kind, type) and issubclass(kind, Enum) and kind
}
NUMBERS = {name: value for name, value in vars(valve_abi).items() if name.isupper() and isinstance(value, int)}
GROWING = {"CONTROL", "REGION"}  # heads of mapped pages: fields are appended, the pages keep their size
BEGINS_WITH_A_HEADER = {name for name in LAYOUTS if name.startswith("LINK_") and name != "LINK_HEADER"}


def test_python_and_the_c_compiler_agree_on_every_field_and_number(tmp_path):
    lines = []
    for name, layout in LAYOUTS.items():
        struct = f"struct valve_{name.lower()}"
        shift = 24 if name in BEGINS_WITH_A_HEADER else 0
        lines.append(f'printf("{name} %zu\\n", sizeof({struct}) - {shift});')
        for key in layout.fields:
            place = f"offsetof({struct}, {key}) - {shift}, sizeof((({struct} *)0)->{key})"
            lines.append(f'printf("{name}.{key} %zu %zu\\n", {place});')
    lines += [f'printf("{name} %llu\\n", (unsigned long long)VALVE_{name});' for name in NUMBERS]
    (tmp_path / "show.c").write_text(
        f'#include <stdio.h>\n#include "region.h"\n#include "link.h"\nint main(void) {{ {" ".join(lines)} return 0; }}'
    )
    command = ["cc", "-std=c11", f"-I{ROOT / 'proto/abi'}", "-o", tmp_path / "show", tmp_path / "show.c"]
    subprocess.run(command, check=True)
    said = subprocess.run([tmp_path / "show"], check=True, capture_output=True, text=True).stdout.splitlines()

    ours = []
    for name, layout in LAYOUTS.items():
        ours.append(f"{name} {layout.size}")
        ours += [f"{name}.{key} {one.offset} {one.bytes}" for key, one in layout.fields.items()]
    assert [*ours, *(f"{name} {value}" for name, value in NUMBERS.items())] == said


@pytest.mark.parametrize("header", ["region.h", "kv.h", "link.h"])
def test_every_enumerator_of_the_headers_has_its_name_here(header):
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "proto/abi" / header).read_text(), flags=re.DOTALL)
    ours = {(name, int(member)) for kind in ENUMS.values() for name, member in kind.__members__.items()}

    for body in re.findall(r"enum valve_\w+ \{([^}]*)\}", text):
        for name, value in re.findall(r"VALVE_(\w+)\s*=\s*(1u << \d+|\d+)", body):
            number = eval(value.replace("u", ""))
            assert any(name.endswith(known) and number == member for known, member in ours), name


def test_the_roles_of_the_model_are_those_of_the_header():
    assert {role.name: role.value for role in Role} == {role.name: role.value for role in valve_abi.Role}


def test_nothing_that_a_client_of_version_0_1_relies_on_ever_moves():
    """Shims of 0.1 stay in pods for months. Fields may be added behind; these stay where they are."""
    for name, fields in FROZEN["layouts"].items():
        for key, place in fields.items():
            one = LAYOUTS[name].fields[key]
            assert [one.offset, one.code, one.bytes] == place, f"{name}.{key}"
    for name, members in FROZEN["enums"].items():
        known = {member: int(value) for member, value in ENUMS[name].__members__.items()}
        assert {member: known.get(member) for member in members} == members, name
    assert {name: NUMBERS[name] for name in FROZEN["numbers"]} == FROZEN["numbers"]


def test_messages_of_version_0_1_keep_their_sizes():
    assert {name: LAYOUTS[name].size for name in FROZEN["sizes"].keys() - GROWING} == {
        name: size for name, size in FROZEN["sizes"].items() if name not in GROWING
    }
    for name in GROWING:
        assert LAYOUTS[name].size >= FROZEN["sizes"][name]
    assert LAYOUTS["REGION"].size <= NUMBERS["SLOT_OFFSET"]  # what lies behind the heads stays where it is
    assert LAYOUTS["CONTROL"].size <= NUMBERS["KV_FREE_OFFSET"]

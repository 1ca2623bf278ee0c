"""Programs into which the shim cannot be loaded."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
import sys

import pytest

from valved.cli.loadable import obstacle


@pytest.fixture
def compiled(tmp_path):
    def make(name, compiler, *flags):
        if shutil.which(compiler) is None:
            pytest.skip(f"no {compiler}")
        (tmp_path / "main.c").write_text("int main(void) { return 0; }\n")
        subprocess.run([compiler, *flags, "-o", tmp_path / name, tmp_path / "main.c"], check=True)
        return str(tmp_path / name)

    return make


def test_a_program_that_takes_no_shim_never_passes(compiled, tmp_path):
    static = compiled("static", "gcc", "-static")
    assert "linked statically" in obstacle(static)
    assert "linked statically" in obstacle(compiled("pie", "gcc", "-static-pie"))
    (tmp_path / "script").write_text(f"#!{static} -x\n")
    (tmp_path / "script").chmod(0o755)
    assert "linked statically" in obstacle(str(tmp_path / "script"))


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)  # cap_net_raw, effective
SHOWS = "#include <stdio.h>\n#include <sys/auxv.h>\nint main(void) { return getauxval(AT_SECURE) ? 7 : 0; }\n"


def is_secure(program, user):
    return subprocess.run([program], user=user, group=user, extra_groups=[], check=False).returncode == 7


@AS_ROOT
@pytest.mark.parametrize("user", [0, 65534], ids=["root", "user"])
@pytest.mark.parametrize("rights", ["nothing", "own id", "another's id", "another's group", "capability"])
def test_a_program_that_drops_the_shim_for_its_rights_never_passes(compiled, tmp_path, monkeypatch, user, rights):
    """As the loader itself sees it: also where root starts a program that becomes another user."""
    program = compiled("rights", "gcc")
    (tmp_path / "shows.c").write_text(SHOWS)
    subprocess.run(["gcc", "-o", program, tmp_path / "shows.c"], check=True)
    for folder in (tmp_path, *tmp_path.parents):
        mode = stat.S_IMODE(folder.stat().st_mode)
        if not mode & stat.S_IXOTH:
            folder.chmod(mode | 0o011)
    if rights == "capability":
        os.setxattr(program, "security.capability", CAPABILITY)
    elif rights != "nothing":
        own, other = (user, 1000)
        os.chown(program, own if rights == "own id" else other, other if "group" in rights else user)
        os.chmod(program, 0o2755 if "group" in rights else 0o4755)
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setattr(os, "getgid", lambda: user)

    assert is_secure(program, user) == ("rights of its own" in obstacle(program))
    assert is_secure(program, user) == (
        rights in {"another's id", "another's group"} or (rights, user) == ("capability", 65534)
    )


def test_a_musl_program_never_passes(compiled):
    assert "musl" in obstacle(compiled("musl", "musl-gcc"))


def test_ordinary_programs_pass(compiled, tmp_path):
    assert obstacle(compiled("plain", "gcc")) == ""
    assert obstacle(sys.executable) == obstacle("no-such-command") == obstacle("sh") == ""
    (tmp_path / "script").write_text("#!/usr/bin/env python3\n")
    (tmp_path / "script").chmod(0o755)
    assert obstacle(str(tmp_path / "script")) == ""
    (tmp_path / "torn").write_bytes(b"\x7fELF\x02\x01" + bytes(10))
    (tmp_path / "torn").chmod(0o755)
    assert obstacle(str(tmp_path / "torn")) == ""

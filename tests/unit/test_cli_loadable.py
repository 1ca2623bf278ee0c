"""Programs into which the shim cannot be loaded."""

from __future__ import annotations

import shutil
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

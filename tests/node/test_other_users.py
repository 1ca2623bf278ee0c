"""Users who are not root, beside a daemon of root's: what the groups of the configuration let them do."""

from __future__ import annotations

import grp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from valve_tools.demo.node import EmulatedNode
from valve_tools.emulator.node import Options

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
NOBODY = 65534


# The interpreter may lie where only root can read: one command as root loads what there is to load.
COMMAND = """
import contextlib, email.parser, encodings.ascii, functools, importlib.metadata, io, os, sys
importlib.metadata.version = functools.cache(importlib.metadata.version)
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
import valved.cli.main as cli
with contextlib.redirect_stdout(io.StringIO()):
    cli.main(["status"])
user, groups, *arguments = sys.argv[1:]
os.setgroups([int(group) for group in groups.split(",") if group])
os.setgid(int(user))
os.setuid(int(user))
sys.exit(cli.main(arguments))
"""


def as_user(node, *arguments, groups=()):
    """The command line as a user of no other groups than these."""
    argv = [sys.executable, "-c", COMMAND, str(NOBODY), ",".join(map(str, groups)), *arguments]
    return subprocess.run(
        argv, env=node.environment({"HOME": "/tmp"}), capture_output=True, text=True, cwd="/", check=False
    )


@pytest.fixture
def shared():
    """Groups that every Linux has, in a folder that may be entered: pytest's own are closed to others, and each pytest
    that starts on the machine closes them again."""
    config = 'group = "daemon"\nview_group = "mail"'
    with tempfile.TemporaryDirectory() as name, EmulatedNode(Path(name), options=Options(), config=config) as node:
        node.start_valved()
        for folder in [node.run_dir, *node.run_dir.parents][:-1]:
            folder.chmod(folder.stat().st_mode | 0o055)
        yield node, grp.getgrnam("daemon").gr_gid, grp.getgrnam("mail").gr_gid


def test_nobody_outside_the_groups_reads_or_steers(shared):
    node, _, _ = shared
    for command in (["status"], ["pause"], ["resume"]):
        told = as_user(node, *command)
        assert told.returncode == 4, told.stderr
        assert "you may not use" in told.stderr
        assert "Traceback" not in told.stderr


def test_who_may_look_reads_and_never_steers(shared):
    node, _, view = shared
    assert "valved" in as_user(node, "status", groups=[view]).stdout
    told = as_user(node, "pause", groups=[view])
    assert told.returncode == 4
    assert "may only look" in told.stderr
    assert not node.status().paused


def test_a_member_of_the_group_pauses_resumes_and_claims(shared):
    node, group, _ = shared
    for command, is_paused in (("pause", True), ("resume", False)):  # which fail if the disk takes over 10 ms
        node.wait_for(lambda command=command: as_user(node, command, groups=[group]).returncode == 0, command)
        assert node.status().paused is is_paused
    told = as_user(node, "run", "--online", "--name", "theirs", "--", "true", groups=[group])
    assert told.returncode == 0
    assert "untouched" not in told.stderr

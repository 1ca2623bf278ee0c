"""Several `make build` in one checkout: one builds, the others wait, and what was built is not built again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

PIP = """#!/bin/sh
mkdir inside || echo overlap >> calls
echo "$*" >> calls
sleep 0.05
rmdir inside
"""


def checkout(tmp_path: Path, repository: Path, pip: str) -> None:
    """With a pip that installs nothing."""
    shutil.copy(repository / "Makefile", tmp_path)
    for name in ("pyproject.toml", "tools/build/system.sh", "tune/pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for folder in (".venv/bin", ".venv-tune/bin"):
        for name, text in (("pip", pip), ("python", "#!/bin/sh\n")):
            tool = tmp_path / folder / name
            tool.parent.mkdir(parents=True, exist_ok=True)
            tool.write_text(text)
            tool.chmod(0o755)


def test_two_makes_never_build_at_once_and_the_second_never_builds_again(tmp_path: Path, repository: Path) -> None:
    """An installation made anew pulls the files away from under the tests of the first."""
    checkout(tmp_path, repository, PIP)

    targets = ("build", "build", "venv", ".venv-tune/.installed", ".venv-tune/.installed", "build")
    makes = [subprocess.Popen(["make", target], cwd=tmp_path, stderr=subprocess.PIPE, text=True) for target in targets]
    told = [make.communicate()[1] for make in makes]

    calls = (tmp_path / "calls").read_text().splitlines()
    assert [make.returncode for make in makes] == [0] * len(makes), told
    assert "overlap" not in calls
    assert len(calls) == len(set(calls)) == 2 + 2 + 2 + 1, calls


def test_what_a_build_leaves_running_never_keeps_the_next_make_waiting(tmp_path: Path, repository: Path) -> None:
    """A compiler's server, such as sccache's, inherits what is open."""
    checkout(tmp_path, repository, "#!/bin/sh\nsleep 60 </dev/null >/dev/null 2>&1 &\necho $! >> servers\n")
    try:
        subprocess.run(["make", "build"], cwd=tmp_path, check=True)
        free = subprocess.run(["flock", "-n", ".", "true"], cwd=tmp_path, check=False).returncode == 0
    finally:
        servers = [int(line) for line in (tmp_path / "servers").read_text().split()]
        for pid in servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    assert servers
    assert free


def test_a_machine_without_flock_is_never_told_less_than_what_to_install(tmp_path: Path, repository: Path) -> None:
    checkout(tmp_path, repository, PIP)
    (tmp_path / "tools" / "build" / "system.sh").write_text("echo install it; exit 1\n")
    few = tmp_path / "few"
    few.mkdir()
    for name in ("make", "sh"):
        (few / name).symlink_to(shutil.which(name) or name)

    env = {**os.environ, "PATH": str(few)}
    done = subprocess.run(["make", "build"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "install it" in done.stdout


def test_a_file_that_was_deleted_never_stops_the_build(tmp_path: Path, repository: Path) -> None:
    """git lists it until that is committed."""
    shutil.copy(repository / "Makefile", tmp_path)
    gone = tmp_path / "valved" / "gone.py"
    gone.parent.mkdir()
    gone.touch()
    for command in (["git", "init", "-q"], ["git", "add", "."]):
        subprocess.run(command, cwd=tmp_path, check=True)
    gone.unlink()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "tools" / "build").mkdir(parents=True)
    (tmp_path / "tools" / "build" / "system.sh").touch()

    done = subprocess.run(["make", "-n", "build"], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_a_file_that_was_deleted_never_stays_installed(tmp_path: Path, repository: Path) -> None:
    """What is left of the files may be older than what was installed."""
    checkout(tmp_path, repository, PIP)
    gone = [tmp_path / "valved" / "gone.py", tmp_path / "tune" / "gone.py"]
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    targets, calls = ("build", ".venv-tune/.installed"), tmp_path / "calls"

    def builds() -> int:
        calls.write_text("")
        subprocess.run(["make", *targets], cwd=tmp_path, check=True)
        return len(calls.read_text().splitlines())

    for path in gone:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    builds()
    assert builds() == 0
    for path in gone:
        path.unlink()

    assert builds() == 2 + 1
    assert builds() == 0

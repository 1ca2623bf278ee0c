"""Which files a check looks at, and the folders they live in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path.cwd()  # checks run from the root of a checkout, also when they are installed


def tracked(*suffixes: str) -> list[Path]:
    """Files of the project (tracked, or new and not ignored) with one of these suffixes."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    paths = (ROOT / name for name in listing.stdout.split("\0") if name.endswith(suffixes))
    return sorted(path for path in paths if path.is_file())


def command(*argv: str, cwd: Path = ROOT, **env: str) -> list[str]:
    """What a command says where it fails; nothing where it does not."""
    done = subprocess.run(argv, cwd=cwd, check=False, capture_output=True, text=True, env={**os.environ, **env})
    return (done.stdout + done.stderr).strip().splitlines() if done.returncode else []

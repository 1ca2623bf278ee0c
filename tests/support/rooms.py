"""The rooms of this folder, for programs that a test starts; pytest itself has them from pyproject.toml."""

from __future__ import annotations

import os
from pathlib import Path

SUPPORT = Path(__file__).parent
ROOMS = [SUPPORT, *sorted(path for path in SUPPORT.iterdir() if path.is_dir() and path.name.isalpha())]
PYTHONPATH = os.pathsep.join(map(str, ROOMS))

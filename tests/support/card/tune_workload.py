"""`valve demo tune`'s training, paused before a tile of its first steps until a file says that it may go on.

Run in the environment that can train: FOLDER OUT STEPS SPIN_US STASH_MIB TILE RESIDENT.
"""

from __future__ import annotations

import sys
from pathlib import Path

from valve_tune.serve.control import FolderControl
from valve_tune.train.report import Answer

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools" / "demo"))
import tune_program

FOLDER, OUT, (STEPS, SPIN_US, STASH_MIB, TILE, RESIDENT) = (
    Path(sys.argv[1]),
    Path(sys.argv[2]),
    map(int, sys.argv[3:8]),
)


class PausedOnce(FolderControl):
    asked = 0

    def answer(self) -> Answer:
        said = super().answer()
        if said is not Answer.GO:
            return said
        if self.asked == TILE and not (FOLDER / "go").exists():
            return Answer.PAUSE
        self.asked += 1
        return Answer.GO


raise SystemExit(tune_program.train(FOLDER, OUT, STEPS, SPIN_US, STASH_MIB, PausedOnce, RESIDENT))

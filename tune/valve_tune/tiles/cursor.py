"""Where a job stands: small, saved with every checkpoint, and refused when it belongs to another job."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from valve_tune.tiles.grid import Phase


class ForeignCursor(ValueError):
    """The saved cursor belongs to other weights, other data or another grid, or it is no cursor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """`step` optimizer steps are done, and `sequence` micro-batches of the next one. The rest names the tile in work:
    it is for people and planners, since a resumed job begins its micro-batch anew.
    """

    step: int = 0
    sequence: int = 0
    phase: Phase = Phase.FORWARD
    layer: int = 0
    token: int = 0
    base: str = ""
    job: str = ""

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self) | {"phase": self.phase.name.lower()}, indent=1, sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> Cursor:
        try:
            fields = json.loads(text)
            cursor = cls(**{**fields, "phase": Phase[str(fields["phase"]).upper()]})
            numbers = (cursor.step, cursor.sequence, cursor.layer, cursor.token)
            words = (cursor.base, cursor.job)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ForeignCursor(f"not a cursor: {error}") from error
        if any(type(number) is not int or number < 0 for number in numbers) or any(type(w) is not str for w in words):
            raise ForeignCursor("not a cursor: a field has the wrong type")
        return cursor

    def check(self, *, base: str, job: str) -> None:
        if self.base != base:
            raise ForeignCursor("the checkpoint was made with other base weights")
        if self.job != job:
            raise ForeignCursor("the checkpoint was made with other settings, data or another grid")

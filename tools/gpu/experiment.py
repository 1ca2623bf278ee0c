"""What an experiment is: a question, what its answer decides, and the function that asks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from valve_tools.gpu.outcome import Outcome
from valve_tools.gpu.rig import Rig


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One row of the catalogue. `seconds`: on a card, at most. `decides` finishes "the answer decides ..."."""

    name: str
    question: str
    decides: str
    seconds: int
    run: Callable[[Rig], Outcome]
    silicon: str = ""  # why the emulated GPU cannot answer; "" where it can
    opt_in: bool = False  # only when named: it does what the others never do


def ask(
    name: str, seconds: int, run: Callable[[Rig], Outcome], question: str, decides: str, silicon: str = ""
) -> Experiment:
    """A row of the catalogue in the order in which it is read."""
    return Experiment(name=name, seconds=seconds, run=run, question=question, decides=decides, silicon=silicon)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Experiments for one call of at most ten minutes."""

    name: str
    about: str
    experiments: tuple[Experiment, ...]

    @property
    def seconds(self) -> int:
        return sum(each.seconds for each in self.experiments)

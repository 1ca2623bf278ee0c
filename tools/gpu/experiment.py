"""What an experiment is: a function that asks a question, and what its answer decides."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from valve_tools.gpu.outcome import LabOutcome
from valve_tools.gpu.rig import Rig


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One row of the catalogue. `seconds`: on a card, at most. `decides` finishes "the answer decides ..."."""

    name: str
    question: str
    decides: str
    seconds: int
    run: Callable[[Rig], LabOutcome]
    silicon: str = ""  # why the emulated GPU cannot answer; "" where it can
    opt_in: bool = False  # only when named: it does what the others never do


def experiment(
    name: str, *, seconds: int, decides: str, silicon: str = "", opt_in: bool = False
) -> Callable[[Callable[[Rig], LabOutcome]], Experiment]:
    """Makes an experiment of a function. The first paragraph of its docstring is the question."""

    def of(run: Callable[[Rig], LabOutcome]) -> Experiment:
        question = " ".join((inspect.getdoc(run) or "").partition("\n\n")[0].split())
        return Experiment(
            name=name, question=question, decides=decides, seconds=seconds, run=run, silicon=silicon, opt_in=opt_in
        )

    return of


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentBatch:
    """Experiments for one call of at most ten minutes, in order of value and safety."""

    name: str
    about: str
    experiments: tuple[Experiment, ...]

    @property
    def seconds(self) -> int:
        return sum(each.seconds for each in self.experiments)

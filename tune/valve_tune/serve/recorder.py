"""Hears what a trainer does and writes it down: metrics, the progress line, the page, the state of the folder."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

from valve_tune.serve import metrics, page
from valve_tune.serve.folder import JobFolder, replace_file
from valve_tune.train.report import TrainEvent
from valve_tune.train.spec import JobSpec

PAGE_EVERY_S = 5.0
STATE_EVERY_S = 1.0  # while it stays "running": each write is forced to disk, and the card waits for it
LINE_EVERY_S = 1.0  # where lines are kept (a file, a log); a terminal shows each step
PACE_STEPS = 50


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


class Pace:
    """Tokens a second and time left, from the last steps; the share of the time since the start that was not waited."""

    def __init__(self, max_steps: int, waited: Callable[[], float]) -> None:
        self._max_steps = max_steps
        self._waited = waited
        self._began = time.monotonic()
        self._recent: deque[tuple[float, int]] = deque(maxlen=PACE_STEPS)
        self._last = self._began

    def line(self, event: TrainEvent) -> str:
        now = time.monotonic()
        self._recent.append((now - self._last, event.tokens))
        self._last = now
        took = sum(seconds for seconds, _ in self._recent) or 1e-9
        rate = sum(tokens for _, tokens in self._recent) / took
        left = took / len(self._recent) * (self._max_steps - event.step)
        loss = "-" if event.loss is None else f"{event.loss:.4f}"
        return (
            f"step {event.step}/{self._max_steps}  loss {loss}  {rate:,.0f} tokens/s  "
            f"harvested {self.harvested():.0%}  left {duration(left)}"
        )

    def harvested(self) -> float:
        whole = time.monotonic() - self._began
        return max(0.0, 1 - self._waited() / whole) if whole > 0 else 1.0


class TensorBoard:
    """Where the tensorboard package is installed; else nothing."""

    def __init__(self, folder: JobFolder) -> None:
        self._writer: Any = None
        if importlib.util.find_spec("tensorboard") is None:
            return
        with contextlib.suppress(Exception):  # whatever is wrong with it, the job does not depend on it
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=str(folder.path / "runs"))

    def write(self, event: TrainEvent) -> None:
        if self._writer is None:
            return
        with contextlib.suppress(OSError):
            group = "train" if event.kind == "step" else "eval"
            for name, value in (("loss", event.loss), ("learning_rate", event.lr), ("grad_norm", event.grad_norm)):
                if value is not None:
                    self._writer.add_scalar(f"{group}/{name}", value, event.step)
            self._writer.flush()


class Recorder:
    """Give it to a trainer as `events`."""

    def __init__(
        self,
        folder: JobFolder,
        spec: JobSpec,
        *,
        waited: Callable[[], float] = lambda: 0.0,
        out: TextIO | None = None,
        trained: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self._folder, self._spec, self._out = folder, spec, out
        self._metrics = metrics.MetricsFile(folder.metrics)
        self._board = TensorBoard(folder)
        self._pace = Pace(spec.max_steps, waited)
        self._page_at = self._line_at = self._state_at = 0.0
        self._state = ""
        done = metrics.steps(folder.metrics)
        self.step = max(folder.status().step, *(line["step"] for line in done[-1:]), 0)
        self._trained, self._counted = trained, self.step

    def __call__(self, event: TrainEvent) -> None:
        self.step = event.step
        if event.kind == "step":
            line = self._pace.line(event)
            self._metrics.write(event, harvested=round(self._pace.harvested(), 4))
            self._board.write(event)
            if event.step > self._counted:  # a resumed job does some steps again
                self._counted = event.step
                self._trained(event.tokens)
            self._show(line, is_last=event.step >= self._spec.max_steps)
        else:
            self._metrics.write(event)
            if event.kind == "evaluated":
                self._board.write(event)
            self._tell(f"{event.kind}{f': {event.message}' if event.message else f' at step {event.step}'}")
        self.state("paused" if event.kind == "paused" else "running", "")

    def state(self, state: str, message: str) -> None:
        """A folder that cannot be written ends no job by this: the trainer meets the full disk where it matters."""
        if state == self._state == "running" and time.monotonic() < self._state_at:
            return
        with contextlib.suppress(OSError):
            self._state, self._state_at = state, time.monotonic() + STATE_EVERY_S
            self._folder.say(state, self.step, message)
            if state != "running" or time.monotonic() >= self._page_at:
                self._page_at = time.monotonic() + PAGE_EVERY_S
                replace_file(self._folder.page, self._render(state))

    def _render(self, state: str) -> str:
        evaluated = metrics.steps(self._folder.metrics, "evaluated")
        return page.render(self._spec, state, metrics.steps(self._folder.metrics), evaluated)

    def _show(self, line: str, *, is_last: bool) -> None:
        if self._out is None:
            return
        if self._out.isatty():
            print(f"\r\x1b[K{line}", end="\n" if is_last else "", file=self._out, flush=True)
        elif is_last or time.monotonic() >= self._line_at:
            self._line_at = time.monotonic() + LINE_EVERY_S
            print(line, file=self._out, flush=True)

    def _tell(self, text: str) -> None:
        if self._out is not None:
            start = "\r\x1b[K" if self._out.isatty() else ""
            print(f"{start}{text}", file=self._out, flush=True)

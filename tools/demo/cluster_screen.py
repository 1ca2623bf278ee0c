"""The screen of the cluster demo: steps, what was checked in each, times, and the output of commands as typed.

Line by line, so that a pipe reads the same as a terminal; only the line under work is a terminal's own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

INDENT = "      "


@dataclass
class Screen:
    console: Console
    steps: int = 0
    checks: int = 0
    failures: list[str] = field(default_factory=list)
    figures: list[tuple[str, str, str]] = field(default_factory=list)
    _begun: float = field(default_factory=time.monotonic)

    def step(self, title: str) -> None:
        self.steps += 1
        self.console.print(f"\n[bold cyan]{self.steps:>2}[/]  [bold]{title}[/]  [dim]{self._clock()}[/]")

    def say(self, text: str) -> None:
        for line in text.splitlines():
            self.console.print(f"    {line}", highlight=False)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Tells how long it took."""
        begun = time.monotonic()
        with self.console.status(f"[dim]{text}[/]"):
            yield
        self.console.print(f"    {text}  [dim]{time.monotonic() - begun:.1f} s[/]", highlight=False)

    def check(self, text: str, holds: object) -> None:
        self.checks += 1
        if not holds:
            self.failures.append(text)
        mark = "[green]ok[/]  " if holds else "[bold red]NO[/]  "
        self.console.print(f"    {mark}{text}", highlight=False)

    def command(self, typed: str, output: str, most: int = 40) -> None:
        """What a person would type, and what came; the middle of a long answer is left out."""
        self.console.print(f"    [dim]$[/] [bold]{escape(typed)}[/]", highlight=False)
        lines = output.rstrip().splitlines()
        if len(lines) > most:
            gone = len(lines) - most + 1
            lines = [*lines[: most - 3], f"... {gone} more lines", *lines[-2:]]
        for line in lines:
            self.console.print(f"{INDENT}[dim]{escape(line)}[/]", highlight=False, no_wrap=True, crop=False)

    def figure(self, name: str, value: str, note: str = "") -> None:
        self.figures.append((name, value, note))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            table.add_column(column)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def verdict(self) -> bool:
        self.console.print()
        if self.figures:
            self.table(("measured", "", ""), self.figures)
        for text in self.failures:
            self.console.print(f"[bold red]did not hold:[/] {text}")
        if not self.failures:
            self.console.print(f"[bold green]All {self.checks} checks held[/] in {self._clock()}.")
        return not self.failures

    def _clock(self) -> str:
        seconds = int(time.monotonic() - self._begun)
        return f"{seconds // 60}:{seconds % 60:02d}"

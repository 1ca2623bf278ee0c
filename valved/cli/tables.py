"""What commands print on, and tables that fit it: too narrow, and the columns that say least are left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

SENTENCE_WIDTH = 26
LEAST_WIDTH = 6


class Paper(Console):
    """Where a command prints. Its reader may leave, as `head` does: main.py says what that means."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class FittingTable:
    """Rows of cells. No cell is markup: strangers choose names. `spare` names columns in the order in which they go
    when room is short. The cells of the column `sentence` go on in a next line first: a sentence hides no figures."""

    def __init__(self, title: str, columns: Sequence[str], *, spare: Sequence[str] = (), sentence: str = "") -> None:
        unknown = {*spare, *([sentence] if sentence else [])} - set(columns)
        if unknown:
            raise ValueError(f"no such columns: {sorted(unknown)}")
        self._title = title
        self._columns = list(columns)
        self._spare = list(spare)
        self._sentence = sentence
        self._rows: list[tuple[Text, ...]] = []
        self._widest = [Text()] * len(columns)

    def add_row(self, *cells: str | Text) -> None:
        if len(cells) != len(self._columns):
            raise ValueError(f"{len(cells)} cells for {len(self._columns)} columns")
        row = tuple(cell if isinstance(cell, Text) else Text(cell) for cell in cells)
        self._rows.append(row)
        self._widest = [max(pair, key=lambda cell: cell.cell_len) for pair in zip(self._widest, row, strict=True)]

    def _fit(self, console: Console, shown: Sequence[str], width: int) -> Table:
        """What no column that may go makes room for, the widest cells pay: a figure of which a part is left out says
        something else."""
        table = self._table(shown, self._rows)
        cells = {name: max(self._widest[self._columns.index(name)].cell_len, len(name)) for name in shown}
        cells.pop(self._sentence, None)
        most = Measurement.get(
            console, console.options.update(width=100_000), self._table(shown, [self._widest], SENTENCE_WIDTH)
        )
        if cells and most.maximum > width:
            widest = max(cells, key=lambda name: cells[name])
            least = max(LEAST_WIDTH, cells[widest] - (most.maximum - width))
            table.columns[list(shown).index(widest)].max_width = least
        return table

    def columns_for(self, console: Console, width: int) -> list[str]:
        """The columns that a terminal of this width shows: the widest cells decide, and a live view has no time for
        all."""
        shown = list(self._columns)
        options = console.options.update(width=100_000)
        for name in self._spare:
            if Measurement.get(console, options, self._table(shown, [self._widest], SENTENCE_WIDTH)).maximum <= width:
                break
            shown.remove(name)
        return shown

    def _table(self, shown: Sequence[str], rows: Iterable[Sequence[Text]], most: int | None = None) -> Table:
        """`most`: the width of a sentence, where that is what it may be narrowed to."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for name in shown:
            wraps = name == self._sentence
            table.add_column(name, no_wrap=not wraps, overflow="ellipsis", max_width=most if wraps else None)
        places = [self._columns.index(name) for name in shown]
        for row in rows:
            table.add_row(*(row[at] for at in places))
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(self._title, style="table.title", no_wrap=True, overflow="ellipsis")
        yield self._fit(console, self.columns_for(console, options.max_width), options.max_width)

"""Trace input: any folder of CSV files (plain or gzip) with a header line.

A request trace has the columns `t_s,in_tok,out_tok` (more may follow), sorted by time; a length file has
`in_tok,out_tok` alone. Every other file is ignored, also one that cannot be read as far as its header. A row with a
blank cell is a missing sample and is skipped; a malformed value is refused with file and line, for a silent guess
would change every figure after it. What was ignored or skipped is counted, and pages say so.
"""

from __future__ import annotations

import csv
import enum
import gzip
import hashlib
import io
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

TIMED = ("t_s", "in_tok", "out_tok")
LENGTHS = ("in_tok", "out_tok")
MAX_TOKENS = 10_000_000
MOST_S = 4e9
"""Seconds since 1970 until the year 2096; more than that is in another unit."""
NS = 1_000_000_000
LEAST_OFFSET_NS = 600 * NS

IntArray = npt.NDArray[np.int64]


class TraceError(ValueError):
    """Input that cannot be a trace; the message names the file, the line and what to correct."""


class Half(enum.Enum):
    """Which traces of a folder an experiment may see. Settings are chosen on one half and judged on the other; the
    hash of a file says which, so no person chooses."""

    ALL = "all"
    TUNING = "tuning"
    CLAIMS = "claims"


def half_of(digest: str) -> Half:
    """By the first digit of the file's SHA-256; what was drawn and not read belongs to the claims."""
    return Half.TUNING if digest and int(digest[0], 16) < 8 else Half.CLAIMS


class UnreadableError(TraceError):
    """A file of which not even the header can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSample:
    """What a trace was taken from, by sample.py."""

    seconds: float
    """Of all slices together, silent ends too."""
    of_requests: int
    of_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests of one service, times in ns from the start of the slice."""

    name: str
    arrive_ns: IntArray
    in_tok: IntArray
    out_tok: IntArray
    thin: int = 1
    skipped: int = 0
    """Rows with a blank cell."""
    digest: str = ""
    """SHA-256 of the file."""
    sample: TraceSample | None = None
    """None: it is the load itself."""

    @property
    def requests(self) -> int:
        return int(self.arrive_ns.size)

    @property
    def duration_s(self) -> float:
        return float(self.arrive_ns[-1]) / NS if self.requests else 0.0

    @property
    def label(self) -> str:
        return self.name if self.thin == 1 else f"{self.name}/{self.thin}"

    def thinned(self, thin: int) -> Trace:
        """Every thin-th request: the share of one of `thin` replicas behind a round-robin balancer."""
        return replace(
            self,
            arrive_ns=self.arrive_ns[::thin],
            in_tok=self.in_tok[::thin],
            out_tok=self.out_tok[::thin],
            thin=self.thin * thin,
        )

    def first(self, seconds: float) -> Trace:
        keep = self.arrive_ns < int(seconds * NS)
        return replace(self, arrive_ns=self.arrive_ns[keep], in_tok=self.in_tok[keep], out_tok=self.out_tok[keep])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobLengths:
    """Prompt and answer lengths of a batch job."""

    name: str
    in_tok: IntArray
    out_tok: IntArray
    skipped: int = 0
    """Rows with a blank cell."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Folder:
    """What a trace folder holds."""

    traces: tuple[Trace, ...]
    lengths: tuple[JobLengths, ...]
    ignored: tuple[str, ...]

    def half(self, half: Half) -> Folder:
        """The traces of one half; the batch job's lengths are in both halves: nothing is tuned on them."""
        if half is Half.ALL:
            return self
        mine = tuple(trace for trace in self.traces if half_of(trace.digest) is half)
        if not mine:
            raise TraceError(f"no trace of the folder belongs to the half for {half.value}; name --half all")
        return replace(self, traces=mine)

    @property
    def skipped(self) -> int:
        """Rows with a blank cell, in all files."""
        return sum(one.skipped for one in self.traces) + sum(one.skipped for one in self.lengths)


def require_folder(path: Path) -> Path:
    if not path.is_dir():
        raise TraceError(f"{path} is not a folder; pass a folder of CSV files with columns {','.join(TIMED)}")
    return path


def read_folder(path: Path) -> Folder:
    """Every request trace and length file of `path`, by name; raises TraceError when there is no request trace."""
    traces: list[Trace] = []
    lengths: list[JobLengths] = []
    ignored: list[str] = []
    for file in _files(path):
        found = _read_if_readable(file)
        if isinstance(found, Trace):
            traces.append(found)
        elif isinstance(found, JobLengths):
            lengths.append(found)
        else:
            ignored.append(file.name)
    if not traces:
        raise TraceError(f"{path} holds no request trace: no file has the columns {','.join(TIMED)}")
    return Folder(traces=tuple(traces), lengths=tuple(lengths), ignored=tuple(ignored))


def lengths_in(path: Path) -> list[JobLengths]:
    """The length files of a folder alone, for experiments that replay no requests."""
    found = (_read_if_readable(file, only_lengths=True) for file in _files(path))
    return [one for one in found if isinstance(one, JobLengths)]


def largest(lengths: Sequence[JobLengths]) -> JobLengths:
    """Of several length files the one that every experiment takes."""
    return max(lengths, key=lambda one: int(one.in_tok.size))


def read_file(file: Path, *, only_lengths: bool = False) -> Trace | JobLengths | None:
    """The trace or the lengths in a file, or None when it is neither."""
    if not file.name.endswith((".csv", ".csv.gz")):
        return None
    name = file.name.removesuffix(".gz").removesuffix(".csv")
    records = lines(file)
    header = next(records, (0, []))[1]
    columns = [column.strip() for column in header]
    if set(TIMED) <= set(columns):
        return None if only_lengths else _read_trace(file, name, records, columns)
    if sorted(columns) == sorted(LENGTHS):
        rows, skipped = _read_rows(file, records, columns, LENGTHS)
        if rows:
            return JobLengths(name=name, in_tok=_tokens(rows, 0), out_tok=_tokens(rows, 1), skipped=skipped)
    return None


def _files(path: Path) -> list[Path]:
    return sorted(entry for entry in require_folder(path).iterdir() if entry.is_file())


def _read_if_readable(file: Path, *, only_lengths: bool = False) -> Trace | JobLengths | None:
    try:
        return read_file(file, only_lengths=only_lengths)
    except UnreadableError:
        return None


def lines(file: Path) -> Iterator[tuple[int, list[str]]]:
    """(line on which it begins, cells) of every record, blank lines left out.

    Bytes that are no UTF-8 matter only where a wanted value holds them: they are no number then.
    """
    begins = 1
    try:
        # utf-8-sig: spreadsheets begin a file with a byte order mark.
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(file, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
            reader = csv.reader(stream)
            for cells in reader:
                if cells:
                    yield begins, cells
                begins = reader.line_num + 1
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        kind = TraceError if begins > 1 else UnreadableError
        raise kind(f"{file}: unreadable after line {begins - 1}: {error}") from error


def _read_trace(file: Path, name: str, records: Iterator[tuple[int, list[str]]], columns: list[str]) -> Trace:
    content = file.read_bytes()
    found, skipped = _plain_rows(file, content, columns), 0
    if found is None:
        rows, skipped = _read_rows(file, records, columns, TIMED)
        found = np.asarray(rows, dtype=np.float64).reshape(-1, len(TIMED))
    return Trace(
        name=name,
        arrive_ns=_from_the_start(np.rint(found[:, 0] * NS).astype(np.int64)),
        in_tok=found[:, 1].astype(np.int64),
        out_tok=found[:, 2].astype(np.int64),
        skipped=skipped,
        digest=hashlib.sha256(content).hexdigest(),
    )


def _plain_rows(file: Path, content: bytes, columns: list[str]) -> npt.NDArray[np.float64] | None:
    """The wanted columns read at once; None where any line is other than plain: `_read_rows` says what of it.

    A week of one service has a quarter of a million rows, and a tenth of the time of reading them one by one is enough.
    """
    try:
        text = gzip.decompress(content) if file.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error):
        return None
    text = text.replace(b"\r\n", b"\n").removesuffix(b"\n")
    header, _, body = text.partition(b"\n")
    is_plain = text.isascii() and not any(one in text for one in (b'"', b"\r", b"\0", b"\n\n"))
    if not (is_plain and body and [cell.strip() for cell in header.decode().split(",")] == columns):
        return None
    where = [columns.index(column) for column in TIMED]
    try:
        if not _has_cells(body, len(columns)):
            return None
        found = np.loadtxt(io.BytesIO(body), delimiter=",", comments=None, usecols=where, ndmin=2)
    except ValueError:
        return None
    times, tokens = found[:, 0], found[:, 1:]
    is_good = bool(
        np.isfinite(found).all()
        and times[0] >= 0
        and times[-1] <= MOST_S
        and (np.diff(times) >= 0).all()
        and ((tokens >= 1) & (tokens <= MAX_TOKENS) & (tokens == np.floor(tokens))).all()
    )
    return found if is_good else None


def _has_cells(body: bytes, cells: int) -> bool:
    """Whether each line has so many; `loadtxt` looks at the wanted ones only."""
    marks = np.frombuffer(body + b"\n", dtype=np.uint8)
    ends, commas = np.flatnonzero(marks == ord("\n")), np.flatnonzero(marks == ord(","))
    if len(commas) != len(ends) * (cells - 1):
        return False
    line = np.searchsorted(ends, commas).reshape(len(ends), -1)
    return bool((line == np.arange(len(ends))[:, None]).all())


def _from_the_start(arrive_ns: IntArray) -> IntArray:
    """Times since 1970, or since a longer trace began, count from the first request: no service was idle before it.

    Idle time at the start of a slice is real and stays; more than a quarter of the slice is taken for an offset.
    """
    if arrive_ns.size == 0:
        return arrive_ns
    first, span = int(arrive_ns[0]), int(arrive_ns[-1] - arrive_ns[0])
    return arrive_ns - first if first > max(span // 4, LEAST_OFFSET_NS) else arrive_ns


def _tokens(rows: list[tuple[float, ...]], index: int) -> IntArray:
    return np.asarray([row[index] for row in rows], dtype=np.int64)


def _read_rows(
    file: Path, records: Iterator[tuple[int, list[str]]], columns: list[str], wanted: tuple[str, ...]
) -> tuple[list[tuple[float, ...]], int]:
    """The wanted columns of every complete row, and how many rows had a blank cell."""
    where = [columns.index(column) for column in wanted]
    rows: list[tuple[float, ...]] = []
    skipped = 0
    last_s = 0.0
    for number, cells in records:
        if len(cells) != len(columns):
            raise TraceError(f"{file}:{number}: {len(cells)} cells where the header has {len(columns)}")
        picked = [cells[index].strip() for index in where]
        if not all(picked):
            skipped += 1
            continue
        row = tuple(_value(file, number, column, text) for column, text in zip(wanted, picked, strict=True))
        if wanted[0] == "t_s":
            if row[0] < last_s:
                raise TraceError(f"{file}:{number}: t_s {row[0]} is before the row above ({last_s}); sort the file")
            last_s = row[0]
        rows.append(row)
    return rows, skipped


def _value(file: Path, number: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise TraceError(f"{file}:{number}: {column} is {text!r}, not a number") from None
    if not math.isfinite(value) or value < 0:
        raise TraceError(f"{file}:{number}: {column} is {text}, it must be finite and not negative")
    if column == "t_s" and value > MOST_S:
        raise TraceError(f"{file}:{number}: t_s is {text}, a time in seconds is at most {MOST_S:.0f}: milliseconds?")
    if column != "t_s" and (value != int(value) or not 1 <= value <= MAX_TOKENS):
        raise TraceError(f"{file}:{number}: {column} is {text}, it must be a whole number from 1 to {MAX_TOKENS}")
    return value

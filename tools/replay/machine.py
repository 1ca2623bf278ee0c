"""`valve replay machine`: how far the machine model is from measured layer times, and what a refit would say.

Reads every table with the columns `gpu,model,tp,num_tokens,gemm_ms_per_layer,elementwise_ms_per_layer` (those of the
Vidur project) in a folder or one below it. Compared are the transformer layers alone: no attention, no all-reduce, no
LM head, which such tables leave out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from valve_tools.replay.report import Cell, Report, ReportTable
from valve_tools.sim.machine import GPUS, Gpu
from valve_tools.sim.traces import TraceError, UnreadableError, lines

Floats = NDArray[np.float64]
COLUMNS = ("gpu", "model", "tp", "num_tokens", "gemm_ms_per_layer", "elementwise_ms_per_layer")
SHAPES = {"7b": (6.74e9, 32), "8B": (8.03e9, 32), "34b": (33.7e9, 48), "70b": (69.0e9, 80)}
"""Parameters and layers by the part of a model's name between hyphens."""
DECODE_TOKENS, PROMPT_TOKENS = 256, 512
"""Up to here a batch decodes, from there on it is a prompt: a decoding sequence costs `seq_ns` on top."""
FITTED = ("stream_efficiency", "linear_efficiency", "layer_ns", "seq_ns")
ROUNDS, STEPS = 6, 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Measured time of all layers of one model on `tp` ranks of a card, by tokens in the batch."""

    gpu: str
    model: str
    tp: int
    params: float
    layers: int
    tokens: Floats
    ms: Floats


def run(folder: Path | None) -> Report:
    if folder is None:
        raise TraceError("pass --traces DIR with a table of layer times (columns " + ",".join(COLUMNS) + ")")
    return report(measured(folder))


def measured(folder: Path) -> list[Layers]:
    """Every table of the folder; a model or card that the lab does not know is left out."""
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for path in _files(folder):
        for key, tokens, ms in _rows(path):
            found.setdefault(key, []).append((tokens, ms))
    tables = []
    for (gpu, model, tp), points in sorted(found.items()):
        shape = next((SHAPES[part] for part in model.split("-") if part in SHAPES), None)
        if shape is not None and gpu.upper() in GPUS:
            tokens, ms = np.array(sorted(points)).T
            tables.append(
                Layers(
                    gpu=gpu.upper(),
                    model=model,
                    tp=tp,
                    params=shape[0],
                    layers=shape[1],
                    tokens=tokens,
                    ms=ms * shape[1],
                )
            )
    if not tables:
        raise TraceError(f"{folder}: no table of layer times (columns {','.join(COLUMNS)}) of a known card and model")
    return tables


def has_tables(folder: Path | None) -> bool:
    """Whether any file of the folder has such a header."""
    return folder is not None and any(next(_rows(path), None) for path in _files(folder))


def _files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.csv*"), *folder.glob("*/*.csv*")])


def _rows(path: Path) -> Iterator[tuple[tuple[str, str, int], float, float]]:
    records = lines(path)
    try:
        columns = [column.strip() for column in next(records, (0, []))[1]]
    except UnreadableError:
        return
    if not set(COLUMNS) <= set(columns):
        return
    where = [columns.index(column) for column in COLUMNS]
    for line, cells in records:
        try:
            gpu, model, tp, tokens, *times = (cells[index] for index in where)
            figures = float(tokens), sum(map(float, times))
            if not all(0 < one < math.inf for one in figures):
                raise ValueError(f"{figures[0]:g} tokens in {figures[1]:g} ms, both must be above zero and finite")
            yield (gpu, model, int(tp)), *figures
        except (IndexError, ValueError) as error:
            raise TraceError(f"{path}:{line}: {error}") from error


def predicted_ms(gpu: Gpu, table: Layers) -> Floats:
    """The machine model's time of the same layers (`timing` of tools/sim/machine.py without its fixed parts)."""
    weights_ms = 2 * table.params / (table.tp * gpu.bandwidth_bytes_s * gpu.stream_efficiency) * 1e3
    token_ms = 2 * table.params / (table.tp * gpu.flops * gpu.linear_efficiency) * 1e3
    sequences_ms = np.where(table.tokens <= DECODE_TOKENS, table.tokens * gpu.seq_ns / 1e6, 0.0)
    ms: Floats = np.maximum(weights_ms, token_ms * table.tokens) + sequences_ms + table.layers * gpu.layer_ns / 1e6
    return ms


def errors(gpu: Gpu, table: Layers) -> Floats:
    """Predicted over measured, less one."""
    return predicted_ms(gpu, table) / table.ms - 1


def refit(gpu: Gpu, tables: Sequence[Layers]) -> Gpu:
    """The values of FITTED with the least mean absolute error, one at a time on ever finer grids.

    Decoding and prompts count alike, and every table: most rows of such tables are long prompts.
    """
    starts = {"stream_efficiency": 0.8, "linear_efficiency": 0.6, "layer_ns": 25_000.0, "seq_ns": 10_000.0}
    best = replace(gpu, **starts)  # type: ignore[arg-type]
    reach = 0.5
    for _ in range(ROUNDS):
        for name in FITTED:
            centre: float = getattr(best, name)
            grid = centre * np.linspace(1 - reach, 1 + reach, STEPS)
            tried = [replace(best, **{name: float(value)}) for value in grid]  # type: ignore[arg-type]
            best = min(tried, key=lambda one: np.mean([_distance(one, table) for table in tables]))
        reach *= 0.6
    return best


def _distance(gpu: Gpu, table: Layers) -> float:
    found = np.abs(errors(gpu, table))
    decode, prompts = _halves(table)
    return float(found[decode].mean() + found[prompts].mean())


def _halves(table: Layers) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    return table.tokens <= DECODE_TOKENS, table.tokens >= PROMPT_TOKENS


def report(tables: Sequence[Layers]) -> Report:
    """Also for tables made by hand."""
    names = sorted({table.gpu for table in tables})
    refitted = {name: refit(GPUS[name], [table for table in tables if table.gpu == name]) for name in names}
    return Report(
        name="machine",
        title="Machine model against measured layer times",
        summary=(
            "Time of all transformer layers of a batch, model over measured, less one: medians over a decoding batch "
            f"(up to {DECODE_TOKENS} tokens) and over prompts (from {PROMPT_TOKENS}). `refitted` changes "
            f"{', '.join(FITTED)} of the card for the least mean absolute error over these tables.",
        ),
        tables=(
            ReportTable(
                title="Values",
                columns=("card", *(head for name in FITTED for head in (name, "refitted"))),
                rows=tuple(_values(GPUS[name], refitted[name]) for name in names),
            ),
            ReportTable(
                title="Errors, %",
                columns=("card", "model", "TP", "one token, ms", "model, ms", "decode", "worst", "prompts", "worst",
                         "decode, refitted", "prompts, refitted"),
                rows=tuple(_compared(table, refitted[table.gpu]) for table in tables),
            ),
        ),
        data={name: {field: getattr(gpu, field) for field in FITTED} for name, gpu in refitted.items()},
    )  # fmt: skip


def _values(shipped: Gpu, refitted: Gpu) -> tuple[Cell, ...]:
    pairs = ((getattr(shipped, name), getattr(refitted, name)) for name in FITTED)
    return (shipped.name, *(value for pair in pairs for value in pair))


def _compared(table: Layers, refitted: Gpu) -> tuple[Cell, ...]:
    shipped = GPUS[table.gpu]
    decode, prompts = _halves(table)
    now, then = 100 * errors(shipped, table), 100 * errors(refitted, table)
    return (
        table.gpu,
        table.model,
        table.tp,
        float(table.ms[0]),
        float(predicted_ms(shipped, table)[0]),
        *(float(figure) for rows in (decode, prompts) for figure in (np.median(now[rows]), np.abs(now[rows]).max())),
        *(float(np.median(then[rows])) for rows in (decode, prompts)),
    )

"""A fleet of online services for a week: per minute, how idle each replica is and how much memory it leaves.

From a folder with ServeGen-style rate files (columns t, client, rate, cv) and their length files, or, without one,
from a seeded generator of daily curves. Requests are not replayed one by one (a week of 8,000 GPUs has 1e9):
arrivals per minute are drawn with the window's rate and dispersion, a replica's busy time is the union of request
intervals (Poisson within the minute), its KV is what the requests in flight hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from valve_tools.sim.traces import MAX_TOKENS, MOST_S, TraceError, lines

Floats = NDArray[np.float64]
WINDOW_S = 600
DAY_S = 86_400
WINDOWS = 7 * 24 * 6
MINUTES_PER_WINDOW = 10
MINUTES = WINDOWS * MINUTES_PER_WINDOW
STEPS = 255
"""Shares and memory are kept as bytes: 0.4 % and 0.3 GiB are finer than anything decided on them."""

MOST = {"t": MOST_S, "rate": 1e9, "cv": 1e6, "mean": float(MAX_TOKENS)}
"""Largest values of a column of rates or lengths that can be meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineModel:
    """One online model on its GPUs: timings and memory per GPU (facts: Vidur tables, model shapes)."""

    name: str
    ranks: int
    prefill_tokens_per_s: float
    token_s: float
    weights_gib: float
    kv_gib_per_token: float


ONLINE_8B = OnlineModel(
    name="8B", ranks=1, prefill_tokens_per_s=28e3, token_s=0.0066, weights_gib=15.0, kv_gib_per_token=128 / 2**20
)
ONLINE_32B = OnlineModel(
    name="32B TP2", ranks=2, prefill_tokens_per_s=15e3, token_s=0.0145, weights_gib=30.5, kv_gib_per_token=128 / 2**20
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """How services become a fleet; every value a parameter."""

    nodes: int = 1000
    gpus_per_node: int = 8
    usable_gib: float = 71.8
    """78 GiB of an H100 at 0.92."""
    overhead_gib: float = 3.0
    """CUDA context, graphs and activations of one engine."""
    fleet_idle: float = 0.46
    """Replicas are sized, by one peak concurrency for all services, so that the fleet is idle this share of time."""
    peak_over_mean: float = 8.0
    """Services with a higher peak are left out: no operator gives such a service GPUs of its own."""
    copy_gpus: int = 64
    """Largest part of a service that is copied into the fleet as one piece."""
    shift_h: float = 3.0
    scale: float = 0.2
    cooldown_s: float = 0.02
    partly_overlapping: float = 0.32
    """Share of multi-GPU instances whose ranks are busy at only partly the same times (the paper)."""
    partial_alignment: tuple[float, float] = (0.3, 0.95)
    """Overlap over union of those; the rest overlap by 0.97 to 1. Synthetic: no public trace groups ranks."""
    hold_minutes: int = 60
    """The reservation keeps what the busiest minute of the last hour needed."""
    headroom: float = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetService:
    """One service's week: requests/s and dispersion per window, and what a request costs."""

    name: str
    model: OnlineModel
    rate: Floats
    cv: Floats
    in_tokens: float
    out_tokens: float

    @property
    def latency_s(self) -> float:
        return self.in_tokens / self.model.prefill_tokens_per_s + self.out_tokens * self.model.token_s

    @property
    def concurrency(self) -> Floats:
        return self.rate * self.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """What the services do to the GPUs. GPU g of node n is row n * 8 + g."""

    settings: LoadSettings
    replica_of_gpu: NDArray[np.int64]
    rank_alignment: Floats
    """Per replica: overlap over union of its ranks' busy time; 1 for one rank."""
    ranks: NDArray[np.int64]
    idle: NDArray[np.uint8]
    """[replicas, minutes], of STEPS: share of the minute that offline may use, cooldown already taken off."""
    free: NDArray[np.uint8]
    """[replicas, minutes], of STEPS: memory beyond online's weights and reservation, over usable_gib."""
    borrowed: int
    """Services that had no lengths of their own."""


def fleet_load(services: list[FleetService], settings: LoadSettings, seed: int, borrowed: int = 0) -> FleetLoad:
    """Copies of the services, shifted and scaled, until every GPU is taken; then minute by minute."""
    rng = np.random.default_rng(seed)
    kept = [one for one in services if _peak(one) <= settings.peak_over_mean * one.concurrency.mean()]
    if not kept:
        raise TraceError(f"no service has a peak within {settings.peak_over_mean} times its mean")
    peak = _sized(kept, settings, np.random.default_rng(seed))
    copies = list(_copies(kept, settings, peak, rng))
    idle, free, ranks = [], [], []
    for service, replicas in copies:
        one_idle, one_free = _replicas(service, replicas, settings, rng)
        idle.append(one_idle)
        free.append(one_free)
        ranks += [service.model.ranks] * replicas
    counts = np.array(ranks)
    return FleetLoad(
        settings=settings,
        replica_of_gpu=_placed(counts, settings, rng),
        rank_alignment=_alignments(counts, settings, rng),
        ranks=counts,
        idle=np.concatenate(idle),
        free=np.concatenate(free),
        borrowed=borrowed,
    )


def drawn_services(seed: int, count: int = 40) -> list[FleetService]:
    """A seeded stand-in for the rate files: daily and weekly curves, noise, bursts, log-normal lengths."""
    rng = np.random.default_rng(seed)
    hours = np.arange(WINDOWS) / 6
    services = []
    for number in range(count):
        daily = 1 + rng.uniform(0.3, 0.9) * np.sin(2 * np.pi * (hours - rng.uniform(7, 13)) / 24)
        weekend = np.where(hours % 168 >= 120, rng.uniform(0.6, 1.0), 1.0)
        noise = rng.gamma(25.0, 1 / 25.0, WINDOWS)
        services.append(
            FleetService(
                name=f"drawn-{number}",
                model=ONLINE_8B if number % 2 else ONLINE_32B,
                rate=rng.lognormal(np.log(20.0), 0.8) * daily * weekend * noise,
                cv=rng.lognormal(np.log(1.3), 0.4, WINDOWS),
                in_tokens=float(rng.lognormal(np.log(900), 0.9)),
                out_tokens=float(rng.lognormal(np.log(250), 0.8)),
            )
        )
    return services


def services_from(traces_dir: Path, seed: int) -> tuple[list[FleetService], int]:
    """Services of every (rates, lengths) pair of files of a week, none without one; how many borrow lengths by seed.

    The pair with longer outputs in its lengths becomes the 32B service, the other the 8B one.
    """
    pairs = []
    for path in sorted(traces_dir.glob("*_rates.csv*")):
        lengths = path.with_name(path.name.replace("_rates.", "_lengths."))
        if lengths.exists():
            rates = _read_rates(path)
            if max(int(one[0].max()) for one in rates.values()) >= WINDOWS * 6 // 7:
                pairs.append((rates, _read_lengths(lengths)))
    pairs.sort(key=lambda pair: float(np.median([one["output"] for one in pair[1].values()])))
    rng = np.random.default_rng(seed)
    services, borrowed = [], 0
    for number, (rates, lengths_of) in enumerate(pairs):
        named = sorted(lengths_of, key=_in_order)
        for client in sorted(rates, key=_in_order):
            lender = client if client in lengths_of else named[int(rng.integers(len(named)))]
            borrowed += client not in lengths_of
            windows, rate, cv = rates[client]
            full_rate, full_cv = np.zeros(WINDOWS), np.ones(WINDOWS)
            inside = windows < WINDOWS
            full_rate[windows[inside]], full_cv[windows[inside]] = rate[inside], cv[inside]
            if full_rate.any():
                services.append(
                    FleetService(
                        name=f"{number}-{client}",
                        model=ONLINE_8B if number == 0 and len(pairs) > 1 else ONLINE_32B,
                        rate=full_rate,
                        cv=full_cv,
                        in_tokens=lengths_of[lender]["input"],
                        out_tokens=lengths_of[lender]["output"],
                    )
                )
    return services, borrowed


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    records = lines(path)
    columns = [column.strip() for column in next(records, (0, []))[1]]
    for line, cells in records:
        if len(cells) != len(columns):
            raise TraceError(f"{path}:{line}: {len(cells)} cells where the header has {len(columns)}")
        yield line, dict(zip(columns, (cell.strip() for cell in cells), strict=True))


def _number(path: Path, line: int, row: Mapping[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        raise TraceError(f"{path}:{line}: column {column} holds {row[column]!r}, no number") from None
    if not 0 <= value <= MOST[column]:
        raise TraceError(f"{path}:{line}: column {column} holds {value}, it must be from 0 to {MOST[column]:g}")
    return value


def _client(text: str) -> str:
    """A client's name; numbers may be written as 7 or as 7.0."""
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() else text


def _in_order(client: str) -> tuple[bool, int, str]:
    """Numbers by value, before names."""
    is_name = not client.lstrip("-").isdecimal()
    return (is_name, 0, client) if is_name else (is_name, int(client), "")


def _read_rates(path: Path) -> dict[str, tuple[NDArray[np.int64], Floats, Floats]]:
    """By client; a row with a blank cell is a missing sample."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for line, row in _rows(path):
        if all(row.get(name) for name in ("client", "t", "rate", "cv")):
            at, rate, cv = (_number(path, line, row, name) for name in ("t", "rate", "cv"))
            found.setdefault(_client(row["client"]), []).append((at, rate, cv))
    if not found:
        raise TraceError(f"{path}: no row with client, t, rate and cv")
    arrays = {client: np.array(rows).T for client, rows in found.items()}
    # A file of a later week counts its seconds on: its first day is day 0 here.
    first_s = min(one[0].min() for one in arrays.values()) // DAY_S * DAY_S
    return {
        client: (((one[0] - first_s) // WINDOW_S).astype(np.int64), one[1], one[2]) for client, one in arrays.items()
    }


def _read_lengths(path: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, list[float]]] = {}
    for line, row in _rows(path):
        if row.get("kind") in ("input", "output") and row.get("mean") and row.get("client"):
            means = found.setdefault(_client(row["client"]), {"input": [], "output": []})
            means[row["kind"]].append(_number(path, line, row, "mean"))
    whole = {client: one for client, one in found.items() if one["input"] and one["output"]}
    if not whole:
        raise TraceError(f"{path}: no client with the mean of an input and of an output")
    return {client: {kind: float(np.mean(values)) for kind, values in one.items()} for client, one in whole.items()}


def _peak(service: FleetService) -> float:
    return float(np.quantile(service.concurrency, 0.999))


def _sized(services: list[FleetService], settings: LoadSettings, rng: np.random.Generator) -> float:
    """The peak concurrency per replica at which the copies below leave the fleet idle as wanted; by bisection."""
    low, high = 0.2, 60.0
    for _ in range(24):
        peak = (low * high) ** 0.5
        gpus = idle = 0.0
        for service in services:
            replicas = min(settings.copy_gpus // service.model.ranks, max(1, round(_peak(service) / peak)))
            mean = service.concurrency / max(_peak(service), 1e-9) * peak
            gpus += replicas * service.model.ranks
            idle += replicas * service.model.ranks * float(np.exp(-mean).mean())
        low, high = (low, peak) if idle / gpus < settings.fleet_idle else (peak, high)
    return float(peak)


def _copies(
    services: list[FleetService], settings: LoadSettings, peak: float, rng: np.random.Generator
) -> Iterator[tuple[FleetService, int]]:
    left = settings.nodes * settings.gpus_per_node
    while left > 0:
        for number in rng.permutation(len(services)):
            service = services[int(number)]
            ranks = service.model.ranks
            if left <= 0 or ranks > left:
                continue
            wanted = min(settings.copy_gpus // ranks, max(1, round(_peak(service) / peak)), left // ranks)
            shift = round(rng.uniform(-settings.shift_h, settings.shift_h) * 6)
            scale = rng.uniform(1 - settings.scale, 1 + settings.scale)
            share = scale * peak / max(_peak(service), 1e-9)
            yield (
                replace(service, rate=np.roll(service.rate, shift) * share, cv=np.roll(service.cv, shift)),
                wanted,
            )
            left -= wanted * ranks
        if left == 1 and all(service.model.ranks > 1 for service in services):
            raise TraceError("the fleet has an odd GPU that no service fits")


def _replicas(
    service: FleetService, replicas: int, settings: LoadSettings, rng: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """`service.rate` is one replica's share here. The service's bursts hit all its replicas together."""
    per_minute = np.repeat(service.rate * 60, MINUTES_PER_WINDOW)
    excess = np.maximum(np.repeat(service.cv, MINUTES_PER_WINDOW) ** 2 - 1, 0)
    variance = np.minimum(excess / np.maximum(per_minute * replicas, 1.0), 4.0)
    together = np.where(variance > 0, rng.gamma(1 / np.maximum(variance, 1e-6)) * np.maximum(variance, 1e-6), 1.0)
    arrivals = rng.poisson(np.broadcast_to(per_minute * together, (replicas, MINUTES))).astype(np.float32)
    in_flight = _smoothed(arrivals * np.float32(service.latency_s / 60), service.latency_s)
    idle = np.exp(-in_flight - arrivals * np.float32(settings.cooldown_s / 60))
    busiest = in_flight + 2 * np.sqrt(in_flight)
    tokens = service.in_tokens + service.out_tokens / 2
    wanted = _held(busiest, settings.hold_minutes) * (tokens * service.model.kv_gib_per_token * settings.headroom)
    pool = settings.usable_gib - service.model.weights_gib - settings.overhead_gib
    free = np.clip(pool - wanted, 0, pool) / settings.usable_gib
    return np.rint(idle * STEPS).astype(np.uint8), np.rint(free * STEPS).astype(np.uint8)


def _smoothed(load: NDArray[np.float32], latency_s: float) -> NDArray[np.float32]:
    """Requests stay in flight for their latency: an exponential memory of that length; nothing below 15 s."""
    keep = np.float32(np.exp(-60 / latency_s)) if latency_s > 15 else np.float32(0)
    if keep == 0:
        return load
    smooth = np.empty_like(load)
    at = load[:, 0].copy()
    for minute in range(load.shape[1]):
        at += (1 - keep) * (load[:, minute] - at)
        smooth[:, minute] = at
    return smooth


def _held(values: NDArray[np.float32], minutes: int) -> NDArray[np.float32]:
    """Maximum of the last `minutes` minutes, by doubling windows; the week wraps around."""
    held, width = values, 1
    while width < minutes:
        step = min(width, minutes - width)
        held = np.maximum(held, np.roll(held, step, axis=1))
        width += step
    return held


def _placed(ranks: NDArray[np.int64], settings: LoadSettings, rng: np.random.Generator) -> NDArray[np.int64]:
    """Replicas to GPUs: multi-rank ones first on even places, single ones fill the rest, in random order."""
    gpus = settings.nodes * settings.gpus_per_node
    slots = np.full(gpus, -1, dtype=np.int64)
    pairs = rng.permutation(gpus // 2)
    wide = np.flatnonzero(ranks == 2)
    slots[2 * pairs[: len(wide)]] = wide
    slots[2 * pairs[: len(wide)] + 1] = wide
    slots[slots < 0] = rng.permutation(np.flatnonzero(ranks == 1))[: int((slots < 0).sum())]
    return slots


def _alignments(ranks: NDArray[np.int64], settings: LoadSettings, rng: np.random.Generator) -> Floats:
    partly = rng.random(len(ranks)) < settings.partly_overlapping
    low, high = settings.partial_alignment
    aligned = np.where(partly, rng.uniform(low, high, len(ranks)), rng.uniform(0.97, 1.0, len(ranks)))
    return np.where(ranks > 1, aligned, 1.0)

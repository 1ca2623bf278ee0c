"""One adapter of several that were trained apart from one version, weighted by the tokens of each.

Averaging A and B apart is not averaging their products: what is served is B A. So either A is frozen and B averaged,
which is exact, or the products are averaged and cut to the rank, and what the cut leaves over (`residual`)
is added to the next average.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as tensor_bytes

from valve_tune.model.adapter import Adapter, LoraPair

FROZEN_A, PRODUCTS, APART = "frozen-a", "products", "apart"
METHODS = (FROZEN_A, PRODUCTS, APART)
"""`apart` is for comparison: it averages A and B each by itself."""
RESIDUAL_RANK = 4  # of the rank: what is kept of the residual


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    pairs: Mapping[str, LoraPair]
    tokens: int


def average(
    parts: Sequence[Part], method: str, residual: Mapping[str, LoraPair]
) -> tuple[dict[str, LoraPair], dict[str, LoraPair]]:
    """(the pairs, the residual). The same parts in the same order give the same bytes on one machine."""
    total = sum(part.tokens for part in parts)
    if not parts or total <= 0 or method not in METHODS:
        raise ValueError("an average is of at least one part with tokens, by a method that is known")
    weights = [part.tokens / total for part in parts]
    pairs: dict[str, LoraPair] = {}
    left: dict[str, LoraPair] = {}
    for path, first in parts[0].pairs.items():
        mine = [part.pairs[path] for part in parts]
        if method == PRODUCTS:
            pairs[path], left[path] = _of_products(mine, weights, residual.get(path))
            continue
        if method == FROZEN_A and any(not torch.equal(pair.a, first.a) for pair in mine):
            raise ValueError(f"{path}: A is not the same in all parts, so B alone cannot be averaged")
        b = sum((weight * pair.b for weight, pair in zip(weights, mine, strict=True)), torch.zeros_like(first.b))
        a = sum((weight * pair.a for weight, pair in zip(weights, mine, strict=True)), torch.zeros_like(first.a))
        pairs[path] = LoraPair(first.a.clone() if method == FROZEN_A else a, b)
    return pairs, left


def _of_products(
    pairs: Sequence[LoraPair], weights: Sequence[float], residual: LoraPair | None
) -> tuple[LoraPair, LoraPair]:
    """sum of w B A, as its best approximation of the rank and of what is left of it; never written out as a matrix."""
    rank = pairs[0].a.shape[0]
    stack = [(pair.a.double(), weight * pair.b.double()) for weight, pair in zip(weights, pairs, strict=True)]
    if residual is not None:
        stack.append((residual.a.double(), residual.b.double()))
    a, b = torch.cat([one for one, _ in stack]), torch.cat([one for _, one in stack], dim=1)
    qb, rb = torch.linalg.qr(b)
    qa, ra = torch.linalg.qr(a.T)
    u, values, v = torch.linalg.svd(rb @ ra.T)
    root = values.sqrt()
    wide_b, wide_a = qb @ u[:, : len(values)] * root, (qa @ v[: len(values)].T * root).T
    kind = pairs[0].a.dtype
    cut = min(len(values), rank + RESIDUAL_RANK * rank)
    kept = LoraPair(_filled(wide_a[:rank], rank, 0).to(kind), _filled(wide_b[:, :rank], rank, 1).to(kind))
    return kept, LoraPair(wide_a[rank:cut].to(kind).contiguous(), wide_b[:, rank:cut].to(kind).contiguous())


def _filled(matrix: torch.Tensor, rank: int, axis: int) -> torch.Tensor:
    """A product of less than the rank (the first step of a new adapter) is filled up with nothing."""
    lacks = rank - matrix.shape[axis]
    if lacks > 0:
        shape = list(matrix.shape)
        shape[axis] = lacks
        matrix = torch.cat([matrix, matrix.new_zeros(shape)], dim=axis)
    return matrix.contiguous()


def pairs_of(adapter: Adapter) -> dict[str, LoraPair]:
    return {path: LoraPair(pair.a.clone(), pair.b.clone()) for path, pair in adapter.pairs.items()}


def put(adapter: Adapter, pairs: Mapping[str, LoraPair]) -> None:
    with torch.no_grad():
        for path, pair in adapter.pairs.items():
            pair.a.copy_(pairs[path].a)
            pair.b.copy_(pairs[path].b)


def pairs_bytes(pairs: Mapping[str, LoraPair]) -> bytes:
    named = {f"{path}.{name}": getattr(pair, name).cpu().contiguous() for path, pair in pairs.items() for name in "ab"}
    document: bytes = tensor_bytes(named)
    return document


def pairs_from(document: bytes) -> dict[str, LoraPair]:
    named = parse_tensors(document)
    paths = sorted({name[:-2] for name in named})
    return {path: LoraPair(named[f"{path}.a"], named[f"{path}.b"]) for path in paths}


def parcel(files: Mapping[str, bytes]) -> bytes:
    """Several documents as one, for the way: a line of JSON with their sizes, then they."""
    sizes = {name: len(files[name]) for name in sorted(files)}
    return json.dumps(sizes).encode() + b"\n" + b"".join(files[name] for name in sorted(files))


def unparcel(document: bytes) -> dict[str, bytes]:
    head, _, rest = document.partition(b"\n")
    found, at = {}, 0
    for name, size in json.loads(head).items():
        found[name] = rest[at : at + size]
        at += size
    if at != len(rest):
        raise ValueError("a parcel is not whole")
    return found

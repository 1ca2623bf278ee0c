"""What a model asks of its frozen weights, and how they are read from a Hugging Face folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from valve_tune.base.copies import on_host
from valve_tune.tiles.grid import Phase

Tensors = Mapping[str, torch.Tensor]
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class BadBase(ValueError):
    """The folder holds no usable base model; says which file and what is wrong with it."""


class BaseChanged(BadBase):
    """The weights are not those the job began with: nothing trained on them is kept."""


class FrozenWeights(Protocol):
    """Names inside a layer are those of the checkpoint below `model.layers.N.`."""

    @property
    def outer(self) -> Tensors:
        """Embedding, last norm and head: resident always."""
        ...

    @property
    def digest(self) -> str: ...

    def enter(self, layer: int, phase: Phase) -> Tensors:
        """The weights of one layer, resident until `leave`."""
        ...

    def leave(self, layer: int, phase: Phase) -> None:
        """The phase of this micro-batch is done with the layer."""
        ...

    def check(self) -> None:
        """Raise if the weights are not what they were when the job began."""
        ...

    def permitted(self) -> None:
        """Raise if they may not be read any more. Asked at each tile."""
        ...

    @property
    def is_writable(self) -> bool:
        """Could a stray write of this process change what another one computes with?"""
        ...

    @property
    def least_bytes(self) -> int:
        """Of the memory that the stash lies in: what no micro-batch does without."""
        ...

    @property
    def lent_bytes(self) -> int:
        """What of that memory they have now."""
        ...

    def fit(self, spare: int) -> bool:
        """Between two micro-batches: take of that memory what is lent beside `spare` bytes, or give back. Whether it is
        enough to begin with.
        """
        ...


class StillWeights:
    """Weights in a place of their own that stays as it is."""

    is_writable = False
    least_bytes = lent_bytes = 0
    _layers: Sequence[Tensors]

    def enter(self, layer: int, phase: Phase) -> Tensors:
        return self._layers[layer]

    def check(self) -> None:
        """No other process holds them."""

    def leave(self, layer: int, phase: Phase) -> None:
        """Nothing moves."""

    def permitted(self) -> None:
        """They are the job's own."""

    def fit(self, spare: int) -> bool:
        return True


def shards(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        try:
            names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise BadBase(f"{folder / INDEX}: no weight map: {error}") from error
        return [folder / name for name in sorted(names)]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise BadBase(f"{folder}: neither {SINGLE} nor {INDEX}")


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of every tensor of the checkpoint; its bytes are not read."""
    found: dict[str, tuple[int, ...]] = {}
    for path in shards(folder):
        with _opened(path) as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    return found


def stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, one at a time."""
    for path in shards(folder):
        with _opened(path) as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, ValueError, RuntimeError) as error:
        raise BadBase(f"{path}: {error}") from error
    except Exception as error:  # safetensors raises a class of its own that only derives from Exception
        if type(error).__name__ != "SafetensorError":
            raise
        raise BadBase(f"{path}: {error}") from error


PREFIX = "model.layers."


def place(name: str) -> tuple[int, str]:
    """(layer, name inside it); layer -1 for what is outside the layers."""
    if not name.startswith(PREFIX):
        return -1, name
    number, _, inside = name[len(PREFIX) :].partition(".")
    return int(number), inside


def layers_in(names: Iterable[str]) -> int:
    return 1 + max((place(name)[0] for name in names), default=-1)


def digest_of(tensors: Tensors) -> str:
    """Over names, types, shapes and bytes, in the order of names."""
    state = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for piece in on_host(tensor):
            state.update(piece.view(torch.uint8).numpy())
    return state.hexdigest()


def read_folder(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in stored(folder)}


def split(tensors: Tensors, layers: int) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """(outer, one dictionary a layer). A tied head is the embedding."""
    outer: dict[str, torch.Tensor] = {}
    inner: list[dict[str, torch.Tensor]] = [{} for _ in range(layers)]
    for name, tensor in tensors.items():
        layer, inside = place(name)
        if layer >= layers:
            raise BadBase(f"{name}: config.json says {layers} layers")
        (outer if layer < 0 else inner[layer])[inside] = tensor
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        if name not in outer:
            raise BadBase(f"{name} is missing")
    outer.setdefault("lm_head.weight", outer["model.embed_tokens.weight"])
    return outer, inner

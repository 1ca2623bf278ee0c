"""Tensors of a checkpoint as views of what an engine holds: it keeps q, k, v in one matrix, gate and up in another, and
pads the vocabulary. Rows are sliced and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from valve_tune.base.weights import BadBase, BaseChanged, Tensors

Sizes = Mapping[str, tuple[int, ...]]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PADDED = EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CHUNK = 1 << 20  # words summed at once: eight bytes each for a moment


def as_checkpoint(held: Tensors, sizes: Sizes) -> dict[str, torch.Tensor]:
    """`sizes` are those of the checkpoint's tensors, all of which must be there."""
    held = {name.replace(".base_layer.", "."): tensor for name, tensor in held.items()}
    if HEAD not in held and EMBEDDING in held:
        held[HEAD] = held[EMBEDDING]  # tied: one of them is an alias
    found: dict[str, torch.Tensor] = {}
    for name, size in sizes.items():
        view = held[name] if name in held else _part(held, name, sizes)
        if name in PADDED:
            view = view[: size[0]]
        if tuple(view.shape) != size:
            raise _other(name, tuple(view.shape), size)
        found[name] = view.detach()
    return found


def _part(held: Tensors, name: str, sizes: Sizes) -> torch.Tensor:
    for fused, parts in FUSED.items():
        own = next((part for part in parts if f".{part}." in name), None)
        if own is None:
            continue
        whole = held.get(name.replace(own, fused))
        names = [name.replace(own, part) for part in parts]
        if whole is None or not all(each in sizes for each in names):
            break
        rows = [sizes[each][0] for each in names]
        if whole.shape[0] != sum(rows):
            raise _other(name.replace(own, fused), tuple(whole.shape), (sum(rows), *sizes[name][1:]))
        return whole.split(rows)[names.index(name)]
    raise BadBase(f"{name} is not there: another base, or quantized?")


def _other(name: str, there: tuple[int, ...], size: tuple[int, ...]) -> BadBase:
    return BadBase(f"{name} is {list(there)}, the base's is {list(size)}: tensor parallel, quantized, or another base?")


class Seal:
    """Sums over the bytes of tensors where they lie; a change of one word always shows."""

    def __init__(self, tensors: Tensors, what: str) -> None:
        self._tensors, self._what = tensors, what
        self._sums = self._now()

    def _now(self) -> dict[str, int]:
        return {name: _sum(tensor) for name, tensor in self._tensors.items()}

    def check(self) -> None:
        now = self._now()
        changed = [name for name, there in self._sums.items() if now[name] != there]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise BaseChanged(f"{self._what}: the shared weights changed while the job ran ({changed[0]}{more})")


def _sum(tensor: torch.Tensor) -> int:
    """Each word times an odd number of its own, modulo 2**64: exact, whatever the order in which they are added."""
    words = tensor.reshape(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    odd = torch.arange(CHUNK, dtype=torch.int64, device=tensor.device) * -0x61C8864680B583EA + 1
    total = 0
    for number, part in enumerate(words.split(CHUNK)):
        total += int((part.long() * odd[: part.numel()]).sum()) * (2 * number + 1)
    return total % (1 << 64)

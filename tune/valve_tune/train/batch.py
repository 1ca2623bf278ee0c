"""What the data hands to the trainer: micro-batches of integers, the same for the same job at every start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

IGNORED = -100  # a label that no loss is computed for
PADDING = 0  # the segment of padding; examples of a row count from 1
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of one length. `labels[b, t]` is `input_ids[b, t]` or IGNORED, to be predicted from t - 1 as in Hugging Face
    models. A token sees the tokens before it of its own segment. The first token of a segment is always IGNORED, so no
    prediction crosses from one example into the next.
    """

    input_ids: IntArray  # [rows, length]
    labels: IntArray  # [rows, length]
    segments: IntArray  # [rows, length], PADDING or 1, 2, ...
    positions: IntArray  # [rows, length], from 0 in each segment

    @property
    def tokens(self) -> int:
        """Without padding."""
        return int((self.segments != PADDING).sum())

    @property
    def label_count(self) -> int:
        return int((self.labels != IGNORED).sum())

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {name: getattr(self, name) for name in self.__slots__}


class Dataset(Protocol):
    """A trainer asks by step number, so a resumed run gets what the undisturbed one got."""

    @property
    def digest(self) -> str:
        """Of everything that decides the batches: content, tokenizer, lengths, packing."""
        ...

    def step(self, step: int) -> Sequence[MicroBatch]:
        """The micro-batches of optimizer step `step` (from 0): `gradient_accumulation_steps` of them."""
        ...

    @property
    def held_out(self) -> HeldOut | None:
        """What the job is judged by and never trained on."""
        ...


class HeldOut(Protocol):
    @property
    def digest(self) -> str: ...

    def once(self) -> Iterator[MicroBatch]:
        """Every row once, in the same order each time."""
        ...

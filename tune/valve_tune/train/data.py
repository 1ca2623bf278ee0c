"""From a jsonl file to micro-batches: the same file, tokenizer and seed give the same batches at every start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from valve_tune.train.batch import IGNORED, PADDING, IntArray, MicroBatch
from valve_tune.train.examples import Encoder, Example
from valve_tune.train.lines import BadLine, BadLines, DataError, NoTemplate, Unfit, read
from valve_tune.train.packing import best_fit
from valve_tune.train.spec import JobSpec


def load(spec: JobSpec, tokenizer: Any) -> Rows:
    """Every line read, checked and encoded. DataError names all bad lines; nothing has run yet."""
    rows = load_file(spec, spec.data, tokenizer)
    if spec.eval_data:
        rows.held_out = load_file(spec, spec.eval_data, tokenizer)
        rows.notes += tuple(f"eval_data: {note}" for note in rows.held_out.notes)
    return rows


def load_file(spec: JobSpec, path: str, tokenizer: Any) -> Rows:
    encoder = Encoder(tokenizer, assistant_only=spec.assistant_only_loss, vocabulary=vocabulary(spec.model))
    bad = BadLines()
    examples: list[Example] = []
    cut = empty = 0
    for source in read(path, bad):
        try:
            whole = encoder.encode(source)
        except NoTemplate as fault:
            raise DataError(path, [BadLine(source.line, fault.field, str(fault))]) from None
        except Unfit as unfit:
            bad.add(source.line, unfit)
            continue
        example = whole.cut(spec.max_length)
        cut += example is not whole
        if (example.labels == IGNORED).all():
            empty += 1
        else:
            examples.append(example)
    if bad.count:
        raise DataError(path, bad.kept, count=bad.count)
    if not examples:
        why = f"none of {empty} examples has anything to learn within {spec.max_length} tokens" if empty else "is empty"
        raise DataError(path, [], why)
    notes = [f"{cut} examples have more than {spec.max_length} tokens and were cut"] if cut else []
    notes += [f"{empty} examples have nothing to learn and are left out"] if empty else []
    if encoder.joined:
        notes.append(
            f"{encoder.joined} examples have a token of both prompt and completion, which is not learnt; let a prompt "
            "end without a blank and the completion begin with it"
        )
    return Rows(spec, examples, padding_id(tokenizer), notes)


def padding_id(tokenizer: Any) -> int:
    """What stands where nothing stands: no token sees it and no loss is computed for it."""
    for each in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if each is not None:
            return int(each)
    return 0


def vocabulary(model: str) -> int:
    """How many tokens the base knows, from its config.json."""
    path = Path(model) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        return int(size)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(str(path), [], f"no base model: {error}") from None


class Rows:
    """Examples laid into rows. The order of rows is drawn anew in each pass over the data, by the seed."""

    def __init__(self, spec: JobSpec, examples: Sequence[Example], padding: int, notes: Sequence[str] = ()) -> None:
        self._spec = spec
        self._padding = padding
        self._examples = examples
        lengths = [len(each) for each in examples]
        self._rows = best_fit(lengths, spec.max_length) if spec.packing else [[each] for each in range(len(lengths))]
        self._orders: dict[int, IntArray] = {}
        self.notes = tuple(notes)
        self.held_out: Rows | None = None
        self.digest = self._digest()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def examples(self) -> int:
        return len(self._examples)

    @property
    def tokens(self) -> int:
        return sum(len(each) for each in self._examples)

    @property
    def steps_per_pass(self) -> int:
        """Steps until every row was seen once."""
        return -(-len(self) // (self._spec.per_device_train_batch_size * self._spec.gradient_accumulation_steps))

    def step(self, step: int) -> tuple[MicroBatch, ...]:
        size, count = self._spec.per_device_train_batch_size, self._spec.gradient_accumulation_steps
        first = step * count * size
        return tuple(
            self._batch([self._row(first + batch * size + row) for row in range(size)]) for batch in range(count)
        )

    def once(self) -> Iterator[MicroBatch]:
        """Every row once, as they stand."""
        size = self._spec.per_device_train_batch_size
        for first in range(0, len(self), size):
            rows = self._rows[first : first + size]
            yield self._batch([[self._examples[each] for each in row] for row in rows])

    def _row(self, number: int) -> list[Example]:
        turn, place = divmod(number, len(self._rows))
        if turn not in self._orders:
            # One order is kept, and the one before it while a batch spans both.
            self._orders = {each: order for each, order in self._orders.items() if each == turn - 1}
            self._orders[turn] = np.random.Generator(np.random.PCG64([self._spec.seed, turn])).permutation(len(self))
        return [self._examples[each] for each in self._rows[int(self._orders[turn][place])]]

    def _batch(self, rows: list[list[Example]]) -> MicroBatch:
        length = max(sum(map(len, row)) for row in rows)
        if self._spec.span:
            length = -(-length // self._spec.span) * self._spec.span
        shape = (len(rows), length)
        ids = np.full(shape, self._padding, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        segments = np.full(shape, PADDING, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        for number, row in enumerate(rows):
            at = 0
            for segment, example in enumerate(row, 1):
                here = slice(at, at + len(example))
                ids[number, here] = example.ids
                labels[number, here] = example.labels
                segments[number, here] = segment
                positions[number, here] = np.arange(len(example))
                at += len(example)
        return MicroBatch(input_ids=ids, labels=labels, segments=segments, positions=positions)

    def _digest(self) -> str:
        seen = hashlib.sha256(repr((len(self._examples), self._rows, self._padding)).encode())
        for example in self._examples:
            seen.update(len(example).to_bytes(8, "little") + example.ids.tobytes() + example.labels.tobytes())
        return seen.hexdigest()

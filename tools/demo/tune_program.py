"""The training of `make demo-tune`, run in .venv-tune: `make FOLDER` writes a tiny base and data, `train FOLDER OUT
STEPS [SPIN_US [STASH_MIB]]` trains an adapter.

The arithmetic runs on the CPU. With SPIN_US each tile is a kernel of at least so many microseconds on the emulated GPU:
when an online request arrives, the gate stops it, and with it the training. With STASH_MIB what backward needs of
forward lies in device memory of the node's KV pool.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

TILES_FILE = os.environ.get("VALVE_DEMO_TILES")  # a line for each tile and each update (`CardStretch`)
TILES = open(TILES_FILE, "a", buffering=1) if TILES_FILE else None  # noqa: SIM115
WORDS = [f"w{number}" for number in range(48)]
SPECIALS = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<unk>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def make(folder: Path) -> None:
    """A Llama of four layers with random weights; conversations in which the assistant counts on from the user."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the least that engines on CPU serve
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    words = {word: number for number, word in enumerate([*SPECIALS, *WORDS])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<|end|>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "base")
    with (folder / "train.jsonl").open("w") as file:
        for first in range(len(WORDS)):
            said = [WORDS[(first + place) % len(WORDS)] for place in range(12)]
            turns = [
                {"role": "user", "content": " ".join(said[:4])},
                {"role": "assistant", "content": " ".join(said[4:])},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")


def emulated_device() -> Any:
    """The emulated card, for arithmetic on the CPU (tools/emulator/device.py, installed beside this file)."""
    path = Path(__file__).resolve().parents[1] / "emulator" / "device.py"
    spec = importlib.util.spec_from_file_location("valve_emulated_device", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Device()


class CardStretch:
    """A stretch on the card: when it began and ended, how long it takes a card, and for how long this thread computed
    between the last one and it.
    """

    ended = time.thread_time()

    def __init__(self) -> None:
        self._began, self._used = time.monotonic(), time.thread_time()

    def end(self, spin_us: int) -> float:
        """The time that the gate, or others on this machine, took from it."""
        now, wall = time.thread_time(), time.monotonic()
        took = max(spin_us / 1e6, now - self._used)
        if TILES is not None:
            TILES.write(f"{self._began:.6f} {wall:.6f} {took:.6f} {self._used - CardStretch.ended:.6f}\n")
        CardStretch.ended = time.thread_time()
        return max(0.0, wall - self._began - took)


class OnCard:
    """One micro-batch whose every tile is a kernel of the emulated card."""

    def __init__(self, inner: Any, device: Any, spin_us: int, control: Any) -> None:
        self._inner, self._device, self._spin_us, self._control = inner, device, spin_us, control
        self.border, self.close, self.gradients = inner.border, inner.close, inner.gradients
        self.forward_loss = inner.forward_loss

    def run(self, tile: Any, ask: Any) -> None:
        told = CardStretch()
        with self._device.step(least_us=self._spin_us):
            self._inner.run(tile, ask)
        self._control.waited_s += told.end(self._spin_us)


def train(
    folder: Path, out: Path, steps: int, spin_us: int, stash_mib: int, controls: Any = None, resident: int = 0
) -> int:
    device = emulated_device() if spin_us else None
    import torch

    torch.cuda.is_available = lambda: False  # the emulated GPU runs the emulator's kernels, not torch's
    warnings.filterwarnings("ignore", message="CUDA initialization")
    from valve_tune.serve import jobs
    from valve_tune.serve.control import FolderControl
    from valve_tune.train.build import open_model
    from valve_tune.train.job import Trainer
    from valve_tune.train.pool import borrow

    def on_card(size: int) -> Any:
        assert device is not None
        return torch.frombuffer(device.array(size), dtype=torch.uint8)

    def trainer(spec: Any, dataset: Any, *, events: Any, control: Any) -> Any:
        def make(spec: Any) -> Any:
            model: Any = open_model(
                spec, memory=borrow(stash_mib, on_card) if device is not None and stash_mib else None
            )
            if device is not None:
                start = model.start
                model.start = lambda *a, **k: OnCard(start(*a, **k), device, spin_us, control)
            return model

        made: Any = Trainer(spec, dataset, events=events, control=control, make_model=make)
        update = made._update

        def update_on_card(step: int) -> Any:
            """The optimizer's tensors are on the card, so its arithmetic is."""
            told = CardStretch()
            with device.step() if device is not None else contextlib.nullcontext():
                found = update(step)
            told.end(0)
            return found

        made._update = update_on_card
        return made

    values = {
        **{"model": str(folder / "base"), "data": str(folder / "train.jsonl"), "out": str(out), "max_steps": steps},
        **{"max_length": 128, "learning_rate": 5e-3, "lora_r": 8, "lora_alpha": 16.0, "save_steps": 10},
        **{"lr_scheduler_type": "constant", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        "resident_layers": resident,
    }
    return jobs.train(values, None, controls or FolderControl, trainer)


def main() -> int:
    command, folder = sys.argv[1], Path(sys.argv[2])
    if command == "make":
        make(folder)
        return 0
    steps, spin_us, stash_mib = (int(each) for each in [*sys.argv[4:], "0", "0"][:3])
    return train(folder, Path(sys.argv[3]), steps, spin_us, stash_mib)


if __name__ == "__main__":
    raise SystemExit(main())

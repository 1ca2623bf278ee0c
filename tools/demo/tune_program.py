"""The training of `make demo-tune`, run in .venv-tune: `make FOLDER` writes a tiny base and data, `train FOLDER OUT
STEPS [SPIN_US]` trains an adapter.

The arithmetic runs on the CPU. With SPIN_US each tile begins with a kernel of so many microseconds on the emulated GPU
and waits for it: when an online request arrives, the gate stops that kernel, and with it the training.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

WORDS = [f"w{number}" for number in range(48)]
SPECIALS = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<unk>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
NO_CONTEXT_FLAGS = 0


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


class EmulatedDevice:
    """One kernel at a time on the emulated GPU, through the driver's own calls."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        context, module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._context = context
        self._call("cuCtxSetCurrent", context)
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(b"// valve-emu\n"))
        self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, ctypes.c_char_p(b"emu_spin"))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {code}")

    def spin(self, us: int) -> None:
        """Return when the kernel is done; while offline work is stopped, it is not."""
        value = ctypes.c_uint64(us)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(value))
        one = ctypes.c_uint(1)
        shape = [one] * 6
        self._call("cuCtxSetCurrent", self._context)
        nothing, stream = ctypes.c_uint(0), ctypes.c_void_p()
        self._call("cuLaunchKernel", self._kernel, *shape, nothing, stream, parameters, None)
        self._call("cuCtxSynchronize")


def train(folder: Path, out: Path, steps: int, spin_us: int) -> int:
    device = EmulatedDevice() if spin_us else None
    import torch

    torch.cuda.is_available = lambda: False  # the emulated GPU runs the emulator's kernels, not torch's
    warnings.filterwarnings("ignore", message="CUDA initialization")
    from valve_tune.serve import jobs
    from valve_tune.serve.control import FolderControl
    from valve_tune.train.report import Answer

    class GatedControl(FolderControl):
        """Between two tiles: wait until the GPU has done a kernel of ours."""

        def answer(self) -> Answer:
            said = super().answer()
            if said is Answer.GO and device is not None:
                began = time.monotonic()
                device.spin(spin_us)
                self.waited_s += max(0.0, time.monotonic() - began - spin_us / 1e6)
            return said

    values = {
        **{"model": str(folder / "base"), "data": str(folder / "train.jsonl"), "out": str(out), "max_steps": steps},
        **{"max_length": 128, "learning_rate": 5e-3, "lora_r": 8, "lora_alpha": 16.0, "save_steps": 10},
        **{"lr_scheduler_type": "constant", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    }
    return jobs.train(values, None, GatedControl)


def main() -> int:
    command, folder = sys.argv[1], Path(sys.argv[2])
    if command == "make":
        make(folder)
        return 0
    return train(folder, Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]) if len(sys.argv) > 5 else 0)


if __name__ == "__main__":
    raise SystemExit(main())

"""On PYTHONPATH of a test's process: the trainer only counts and the tokenizer only splits, so that service and command
are tested alone and without seconds of imports.

Its loss depends on the batches alone, so a resumed run must say the same losses. It keeps its place in checkpoint-N.
"""

import json
import os
import re
import sys
import time
import types
from pathlib import Path

TILES = 4


class Trainer:
    def __init__(self, spec, dataset, *, events, control, make_model=None):
        self.spec, self.dataset, self.events, self.control = spec, dataset, events, control
        self.tile_s = float(os.environ.get("FAKE_TILE_S", "0.001"))

    def run(self):
        from valve_tune.train.report import End, Outcome, TrainEvent

        out = Path(self.spec.out)
        saved = sorted((int(path.parent.name.split("-")[1]), path) for path in out.glob("checkpoint-*/place.json"))
        start = saved[-1][0] if saved else 0
        if start:
            self.events(TrainEvent(kind="resumed", step=start))
        if str(start) == os.environ.get("FAKE_DIES_AT") or str(self.spec.seed) == os.environ.get("FAKE_DIES_WITH"):
            os.kill(os.getpid(), 9)
        for step in range(start + 1, self.spec.max_steps + 1):
            began, batches = time.monotonic(), self.dataset.step(step - 1)
            for _ in range(TILES):
                if not self.tile(step - 1):
                    return Outcome(end=End.STOPPED, step=step - 1)
            total = sum(int(batch.input_ids.sum()) for batch in batches)
            self.events(
                TrainEvent(
                    kind="step",
                    step=step,
                    loss=10 / step + total / 1e6,
                    tokens=sum(batch.tokens for batch in batches),
                    seconds=time.monotonic() - began,
                    lr=self.spec.learning_rate,
                    grad_norm=1.0,
                )
            )
            if os.environ.get("FAKE_FAILS_AT") == str(step):
                raise FloatingPointError(f"loss is NaN at step {step}")
            if self.dataset.held_out and step % self.spec.eval_steps == 0:
                self.events(TrainEvent(kind="evaluated", step=step, loss=float(step), message=f"loss {step}"))
            if step % self.spec.save_steps == 0 or step == self.spec.max_steps:
                self.save(out, step)
                self.events(TrainEvent(kind="checkpoint", step=step))
        self.save(out, None)
        return Outcome(end=End.DONE, step=self.spec.max_steps, adapter=out)

    def tile(self, step):
        from valve_tune.train.report import Answer, TrainEvent

        said = False
        while (answer := self.control.answer()) is Answer.PAUSE:
            if not said:
                self.events(TrainEvent(kind="paused", step=step))
            said = True
            self.control.wait()
        time.sleep(self.tile_s)
        while str(step) == os.environ.get("FAKE_WAITS_AT") and (answer := self.control.answer()) is Answer.GO:
            time.sleep(0.01)  # so that a test which is slow to end it never finds it done
        return answer is not Answer.STOP

    def save(self, out, step):
        folder = out if step is None else out / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
        (folder / "adapter_config.json").write_text(json.dumps({"r": self.spec.lora_r, "peft_type": "LORA"}))
        if step is not None:
            (folder / ".place").write_text("{}")
            (folder / ".place").replace(folder / "place.json")


class Words:
    """As much of a tokenizer as the data asks for; its numbers are those of the words."""

    is_fast, eos_token_id, pad_token_id = True, 1, 0
    chat_template = "by hand"

    @classmethod
    def from_pretrained(cls, folder, **_):
        if not (Path(folder) / "tokenizer.json").exists():
            raise OSError("no tokenizer.json")
        return cls()

    def __call__(self, text, **_):
        words = list(re.finditer(r"\S+", text))
        numbers = [2 + int("0" + re.sub(r"\D", "", word[0])) for word in words]
        return {"input_ids": numbers, "offset_mapping": [word.span() for word in words]}

    def apply_chat_template(self, messages, *, add_generation_prompt=False, **_):
        said = "".join(f"<{each['role']}> {each['content']} <end> " for each in messages)
        return said + "<assistant> " * add_generation_prompt


transformers = types.ModuleType("transformers")
transformers.AutoTokenizer = Words
sys.modules["transformers"] = transformers
module = types.ModuleType("valve_tune.train.job")
module.Trainer = Trainer
sys.modules["valve_tune.train.job"] = module

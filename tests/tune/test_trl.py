"""The whole loop against TRL + peft: the same loss at every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import oracle
import pytest
import torch
from valve_tune.model.adapter import PEFT
from valve_tune.train.build import open_model
from valve_tune.train.report import TrainEvent
from valve_tune.train.spec import JobSpec

trl = pytest.importorskip("trl")
STEPS, ACCUMULATED = 200, 2


def their_losses(spec: JobSpec, folder: Path, tmp_path: Path) -> list[float]:
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    words = {str(number): number for number in range(oracle.WIDTHS["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token="0", eos_token="1"
    )
    data = jobs.Counting(spec)
    rows = [row for step in range(STEPS) for row in data.rows(step).tolist()]
    masks = [[0, 0] + [1] * (len(row) - 2) for row in rows]

    found: list[float] = []

    class Recording(trl.SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            out = super().compute_loss(*args, **kwargs)
            found.append(float((out[0] if isinstance(out, tuple) else out).detach()))
            return out

    config = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ACCUMULATED,
        learning_rate=spec.learning_rate,
        lr_scheduler_type=spec.lr_scheduler_type,
        warmup_steps=spec.warmup_steps,
        max_grad_norm=spec.max_grad_norm,
        max_length=16,
        completion_only_loss=True,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    lora = LoraConfig(
        r=spec.lora_r, lora_alpha=spec.lora_alpha, target_modules=list(spec.target_modules), task_type="CAUSAL_LM"
    )
    trainer = Recording(
        model=AutoModelForCausalLM.from_pretrained(folder),
        args=config,
        train_dataset=Dataset.from_dict({"input_ids": rows, "completion_mask": masks}),
        processing_class=tokenizer,
        peft_config=lora,
    )
    parameters = dict(trainer.model.named_parameters())
    with torch.no_grad():
        for name, tensor in open_model(spec).adapter.tensors():
            parameters[PEFT + name.replace(".weight", ".default.weight")].copy_(tensor)
    trainer.train()
    return [sum(found[at : at + ACCUMULATED]) for at in range(0, len(found), ACCUMULATED)]


def test_each_of_200_losses_is_that_of_trl_and_peft(tmp_path: Path) -> None:
    folder = jobs.model_folder(tmp_path / "base")
    spec = jobs.job(
        folder,
        tmp_path / "out",
        max_steps=STEPS,
        gradient_accumulation_steps=ACCUMULATED,
        learning_rate=2e-3,
        warmup_steps=10,
        lora_dropout=0.0,
        save_steps=1000,
    )
    events: list[TrainEvent] = []
    jobs.finished(spec, events=events)
    ours = [event.loss for event in events if event.kind == "step"]
    theirs = their_losses(spec, folder, tmp_path)
    assert len(ours) == len(theirs) == STEPS
    distances = [abs(one - other) for one, other in zip(ours, theirs, strict=True)]
    print(f"largest distance of a loss: {max(distances):.2e} at loss {ours[distances.index(max(distances))]:.3f}")
    assert max(distances) <= 1e-4
    assert sum(ours[-10:]) < sum(ours[:10])

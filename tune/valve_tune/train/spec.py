"""What one finetuning job is: a frozen value with bounded fields, equal in job file, command line and HTTP.

Fields are named as TRL and peft name them. The grid of tiles (`span`, `layers_per_tile`) is part of a job, so that the
same job gives the same bytes however often it was stopped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from typing import Any, get_args, get_type_hints

SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")
DTYPES = ("float32", "bfloat16")
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# What people ask for that a plain adapter cannot be: refused by name, with the way round.
REFUSED = {
    "use_dora": "vLLM rejects DoRA adapters; train plain LoRA with a larger lora_r",
    "use_rslora": "SGLang ignores rsLoRA; multiply lora_alpha by sqrt(lora_r) for the same scale",
    "rank_pattern": "SGLang ignores rank patterns; one lora_r holds for all targets",
    "alpha_pattern": "SGLang ignores alpha patterns; one lora_alpha holds for all targets",
    "modules_to_save": "vLLM rejects modules_to_save; only LoRA on linear layers is served",
    "load_in_4bit": "QLoRA is not offered; run your own trainer: valve run --offline -- trl sft --load_in_4bit ...",
    "load_in_8bit": "8-bit bases are not offered; run your own trainer: valve run --offline -- trl sft ...",
    "fsdp": "one process trains one job; run your own trainer: valve run --offline -- accelerate launch ...",
    "deepspeed": "one process trains one job; run your own trainer: valve run --offline -- deepspeed ...",
    "ddp": "one process trains one job; run your own trainer: valve run --offline -- torchrun ...",
    "bias": "biases are not trained; SGLang ignores them",
    # Of TRL and transformers, with what says the same here.
    "use_peft": "an adapter is all that is trained; leave it out",
    "bf16": "say --dtype bfloat16",
    "fp16": "half precision needs a loss scale, which is not offered; say --dtype bfloat16",
    "torch_dtype": "say --dtype",
    "optim": "AdamW is the optimizer; leave it out",
    "gradient_checkpointing": "cheap parts are always computed again; leave it out",
    "logging_steps": "each step is logged; leave it out",
    "report_to": "metrics.jsonl is always written, and TensorBoard's files where it is installed; leave it out",
    "eval_strategy": "--eval-data alone asks for evaluations, --eval-steps says how often",
    "per_device_eval_batch_size": "evaluations take per_device_train_batch_size",
    "load_best_model_at_end": "--early-stopping-patience keeps the best adapter",
    "resume_from_checkpoint": "the same command goes on where the job was; leave it out",
    "push_to_hub": "nothing is uploaded; valve tune publish hands the adapter to a service",
}

# What may differ between two runs of one job: how it is kept and where its memory is, and what only looks at it.
HOW = {"save_steps", "save_total_limit", "stash_mib", "resident_layers", "share_weights"}
LOOKS = {"eval_data", "eval_steps", "early_stopping_patience"}


class SpecError(ValueError):
    """A job that makes no sense: names the field."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.field = name


def number(low: float, high: float, help: str, **more: Any) -> Any:
    return field(metadata={"low": low, "high": high, "help": help}, **more)


def text(help: str, choices: tuple[str, ...] = (), empty: bool = False, **more: Any) -> Any:
    return field(metadata={"choices": choices, "help": help, "empty": empty}, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job. Every field is checked when the value is made."""

    model: str = text("The folder of the base model (config.json, *.safetensors, tokenizer).")
    data: str = text("The jsonl file of examples: messages, prompt/completion, text, or input_ids/labels.")
    out: str = text("The folder of the adapter, its checkpoints and its metrics.")
    seed: int = number(0, 2**31 - 1, "The seed of data order, adapter and dropout.", default=0)
    max_steps: int = number(1, 10_000_000, "The number of optimizer steps.")
    learning_rate: float = number(1e-9, 10.0, "The peak learning rate, a factor.", default=2e-4)
    lr_scheduler_type: str = text("The schedule of the learning rate.", SCHEDULES, default="cosine")
    warmup_steps: int = number(0, 10_000_000, "The number of steps until the peak learning rate.", default=0)
    weight_decay: float = number(0.0, 1.0, "The weight decay of AdamW, a share.", default=0.0)
    adam_beta1: float = number(0.0, 0.999999, "The factor beta1 of AdamW.", default=0.9)
    adam_beta2: float = number(0.0, 0.999999, "The factor beta2 of AdamW.", default=0.999)
    adam_epsilon: float = number(1e-12, 1e-2, "The number epsilon of AdamW.", default=1e-8)
    max_grad_norm: float = number(
        0.0, 1e6, "Clip the gradient at this norm, a number. 0 stands for never.", default=1.0
    )
    lora_r: int = number(1, 512, "The rank of the adapter, a number.", default=16)
    lora_alpha: float = number(
        1e-3, 1e5, "The number lora_alpha: the adapter's scale is lora_alpha / lora_r.", default=32.0
    )
    lora_dropout: float = number(0.0, 0.9, "The share of dropout before the adapter.", default=0.0)
    target_modules: tuple[str, ...] = text("The linear layers that get an adapter.", default=ALL_LINEAR)
    per_device_train_batch_size: int = number(1, 4096, "The number of rows of a micro-batch.", default=1)
    gradient_accumulation_steps: int = number(1, 65536, "The number of micro-batches of a step.", default=1)
    max_length: int = number(
        2, 1 << 20, "The most tokens of a row. Longer examples are cut, and the job says so.", default=1024
    )
    packing: bool = text("Put several examples in one row, each blind to the others.", default=True)
    assistant_only_loss: bool = text("Count the loss on what the assistant says, not on prompts.", default=True)
    dtype: str = text(
        "The number format of base weights and activations. Adapters and sums are float32.", DTYPES, default="float32"
    )
    save_steps: int = number(1, 10_000_000, "The steps from one checkpoint to the next.", default=50)
    eval_data: str = text("The jsonl file that evaluations take and training does not.", default="", empty=True)
    eval_steps: int = number(1, 10_000_000, "The steps from one evaluation to the next.", default=50)
    early_stopping_patience: int = number(
        0,
        10_000,
        "End the job, with its best adapter, after this number of evaluations without a better loss. 0: never.",
        default=0,
    )
    save_total_limit: int = number(1, 10_000, "The number of checkpoints that are kept.", default=3)
    span: int = number(0, 1 << 20, "The tokens of a tile. 0 stands for the whole row.", default=0)
    layers_per_tile: int = number(1, 1024, "The number of layers of a tile.", default=1)
    share_weights: str = text(
        "Map the weights of this online service, with its owner's consent, or (on a CPU) a file of valve tune share.",
        default="",
        empty=True,
    )
    resident_layers: int = number(
        0,
        1024,
        "The most layers of the base on the GPU, the others on the host. With --stash-mib: in the KV pool. 0: all.",
        default=0,
    )
    stash_mib: int = number(
        0, 1 << 24, "The MiB of the node's KV pool for the stash. 0 stands for the trainer's own memory.", default=0
    )
    deterministic: bool = text("Use deterministic algorithms: the same job gives the same bytes.", default=True)
    threads: int = number(
        0,
        1024,
        "The number of CPU threads. 0 stands for torch's choice: then bytes may differ between machines.",
        default=1,
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, checked(each.name, getattr(self, each.name)))
        if self.warmup_steps > self.max_steps:
            raise SpecError("warmup_steps", f"{self.warmup_steps} is more than max_steps ({self.max_steps})")
        if self.early_stopping_patience and not self.eval_data:
            raise SpecError(
                "early_stopping_patience", "needs eval_data: the loss of training data shows no overfitting"
            )
        if self.share_weights and self.resident_layers:
            raise SpecError("resident_layers", "shared weights are mapped as a whole; set it to 0")
        if self.span and self.max_length % self.span:
            raise SpecError("span", f"{self.span} does not divide max_length ({self.max_length})")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, document: str) -> JobSpec:
        try:
            values = json.loads(document)
        except ValueError as error:
            raise SpecError("job file", f"no JSON: {error}") from None
        return cls.from_values(values)

    @classmethod
    def from_values(cls, values: object) -> JobSpec:
        if not isinstance(values, Mapping):
            raise SpecError("job file", "must be one JSON object")
        known = {each.name: each for each in fields(cls)}
        for name in values:
            if name in REFUSED:
                raise SpecError(str(name), REFUSED[name])
            if name not in known:
                raise SpecError(str(name), "is no field of a job")
        for name, each in known.items():
            if name not in values and each.default is MISSING:
                raise SpecError(name, "is missing")
        return cls(**dict(values))

    def differs(self, other: JobSpec) -> dict[str, tuple[Any, Any]]:
        """Fields in which two jobs differ: (here, there)."""
        pairs = {each.name: (getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@cache
def _plan() -> dict[str, tuple[type, Mapping[str, Any]]]:
    """Type and bounds of each field by its name."""
    hints = get_type_hints(JobSpec)
    return {each.name: (hints[each.name], each.metadata) for each in fields(JobSpec)}


def checked(name: str, value: object) -> Any:
    """The value in its field's own type, or SpecError."""
    kind, bounds = _plan()[name]
    if kind is bool:
        if not isinstance(value, bool):
            raise SpecError(name, f"must be true or false, not {value!r}")
        return value
    if get_args(kind):
        return _names(name, value)
    if kind is str:
        return "" if bounds["empty"] and value == "" else _word(name, value, bounds["choices"])
    return _number(name, value, kind, bounds)


def _number(name: str, value: object, kind: type, bounds: Mapping[str, Any]) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(name, f"must be a number, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise SpecError(name, f"must be finite, not {value}")
    if kind is int and value != int(value):
        raise SpecError(name, f"must be a whole number, not {value}")
    if not bounds["low"] <= value <= bounds["high"]:
        raise SpecError(name, f"must be from {bounds['low']:g} to {bounds['high']:g}, not {value}")
    return kind(value)


def _word(name: str, value: object, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise SpecError(name, f"must be text, not {value!r}")
    if choices and value not in choices:
        raise SpecError(name, f"must be one of {', '.join(choices)}, not {value!r}")
    return value


def _names(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple) or not 1 <= len(value) <= 64:
        raise SpecError(name, "must be a list of 1 to 64 names")
    names = tuple(_word(name, each, ()) for each in value)
    if len(set(names)) != len(names):
        raise SpecError(name, "names one module twice")
    return names

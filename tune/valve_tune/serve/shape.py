"""Rows of the store in the shape of OpenAI's fine-tuning API, and requests in that shape as wishes. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from valve_tune.train.spec import JobSpec, SpecError

SUFFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
KNOWN = {
    *("model", "training_file", "hyperparameters", "method", "suffix", "seed", "metadata", "valve"),
    *("validation_file", "integrations"),
}
RESERVED = (
    "model",
    "data",
    "out",
    "eval_data",
    "resident_layers",
    "share_weights",
)  # the service says where things are
LEARNING_RATE = 2e-4  # what learning_rate_multiplier multiplies
PASSES = 3.0
WEIGHTS = (0.01, 100.0)


class BadRequest(Exception):
    """What is wrong with a request, and which of its parameters."""

    def __init__(self, param: str | None, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


def wish_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a job is to be: fields of JobSpec, passes over the data, and what only the caller needs again."""
    for name in body:
        if name not in KNOWN:
            raise BadRequest(str(name), "unknown parameter")
    if body.get("integrations"):
        raise BadRequest("integrations", "is not offered: metrics are in result_files")
    hyper = hyperparameters(body)
    extra = body.get("valve") or {}
    if not isinstance(extra, Mapping):
        raise BadRequest("valve", "must be an object of job fields")
    fields = dict(extra)
    weight = number("valve.weight", fields.pop("weight", 1.0), *WEIGHTS)
    for name in RESERVED:
        if name in fields:
            raise BadRequest(f"valve.{name}", "is set by the service")
    spec = {**from_hyper(hyper), **fields}
    seed = body.get("seed")
    spec["seed"] = 0 if seed is None else seed
    held_out = body.get("validation_file") or None
    check_spec({**spec, "eval_data": "e"} if held_out else spec)
    passes = None if "max_steps" in spec else hyper_number(hyper, "n_epochs", PASSES, 0.01, 10_000)
    return {
        "spec": spec,
        "passes": passes,
        "validation_file": held_out,
        "weight": weight,
        "hyperparameters": dict(hyper),
        "suffix": suffix_of(body),
        "seed": spec["seed"],
        "metadata": metadata_of(body),
        "method": "supervised",
    }


def check_spec(spec: Mapping[str, Any]) -> None:
    try:
        JobSpec.from_values({"model": "m", "data": "d", "out": "o", "max_steps": 10_000_000, **spec})
    except SpecError as error:
        raise BadRequest(f"valve.{error.field}" if error.field != "seed" else "seed", str(error)) from None


def hyperparameters(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """From where the newer API has them (method), else from where the older had."""
    method = body.get("method") or {}
    if not isinstance(method, Mapping) or method.get("type", "supervised") != "supervised":
        raise BadRequest("method", "only supervised finetuning is offered")
    supervised = method.get("supervised") or {}
    if not isinstance(supervised, Mapping):
        raise BadRequest("method.supervised", "must be an object")
    hyper = supervised.get("hyperparameters") or body.get("hyperparameters") or {}
    if not isinstance(hyper, Mapping):
        raise BadRequest("hyperparameters", "must be an object")
    for name in hyper:
        if name not in ("n_epochs", "batch_size", "learning_rate_multiplier"):
            raise BadRequest(f"hyperparameters.{name}", "unknown; job fields of valve tune go under `valve`")
    return hyper


def from_hyper(hyper: Mapping[str, Any]) -> dict[str, Any]:
    rate = hyper_number(hyper, "learning_rate_multiplier", 1.0, 1e-6, 1e4)
    batch = hyper_number(hyper, "batch_size", 1, 1, 65536)
    if batch != int(batch):
        raise BadRequest("hyperparameters.batch_size", f"must be a whole number, not {batch}")
    return {"learning_rate": LEARNING_RATE * rate, "gradient_accumulation_steps": int(batch)}


def hyper_number(hyper: Mapping[str, Any], name: str, auto: float, low: float, high: float) -> float:
    value = hyper.get(name)
    return auto if value in (None, "auto") else number(f"hyperparameters.{name}", value, low, high)


def number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequest(name, f"must be a number from {low:g} to {high:g}, not {value!r}")
    return float(value)


def suffix_of(body: Mapping[str, Any]) -> str:
    suffix = body.get("suffix") or ""
    if suffix and not (isinstance(suffix, str) and SUFFIX.fullmatch(suffix)):
        raise BadRequest("suffix", "must be up to 64 letters, digits, - and _")
    return str(suffix)


def metadata_of(body: Mapping[str, Any]) -> dict[str, str]:
    metadata = body.get("metadata") or {}
    fits = isinstance(metadata, Mapping) and len(metadata) <= 16
    if not fits or not all(isinstance(value, str) and len(value) <= 512 for value in metadata.values()):
        raise BadRequest("metadata", "must be up to 16 texts of up to 512 characters")
    return dict(metadata)


def file_object(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        "object": "file",
        "bytes": row["bytes"],
        "created_at": row["created"],
        "filename": row["filename"],
        "purpose": row["purpose"],
        "status": "processed",
    }


def name_of(row: Mapping[str, Any], step: int | None = None) -> str:
    """What the finished adapter is called: ft:base:suffix:job, and the step for a checkpoint."""
    suffix = json.loads(row["wish"])["suffix"]
    name = f"ft:{row['base']}:{suffix}:{row['id'].removeprefix('ftjob-')}"
    return name if step is None else f"{name}:ckpt-step-{step}"


def job_object(row: Mapping[str, Any]) -> dict[str, Any]:
    wish = json.loads(row["wish"])
    hyper = dict.fromkeys(("n_epochs", "batch_size", "learning_rate_multiplier"), "auto") | wish["hyperparameters"]
    return {
        "id": row["id"],
        "object": "fine_tuning.job",
        "created_at": row["created"],
        "finished_at": row["finished"],
        "model": row["base"],
        "fine_tuned_model": name_of(row) if row["status"] == "succeeded" else None,
        "organization_id": "",
        "status": row["status"],
        "hyperparameters": hyper,
        "method": {"type": wish["method"], "supervised": {"hyperparameters": hyper}},
        "training_file": row["file"],
        "validation_file": wish.get("validation_file"),
        "result_files": [row["result"]] if row["result"] else [],
        "trained_tokens": row["tokens"],
        "error": json.loads(row["error"]) if row["error"] else {},
        "seed": wish["seed"],
        "estimated_finish": None,
        "integrations": [],
        "metadata": wish["metadata"],
        "valve": {
            "step": row["step"],
            "weight": row["weight"],
            "spec": json.loads(row["spec"]) if row["spec"] else None,
        },
    }


def event_object(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        "object": "fine_tuning.job.event",
        "created_at": row["created"],
        "level": row["level"],
        "message": row["message"],
        "type": row["type"],
        "data": json.loads(row["data"]) if row["data"] else None,
    }


def checkpoint_object(row: Mapping[str, Any], job: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        "object": "fine_tuning.job.checkpoint",
        "created_at": row["created"],
        "fine_tuned_model_checkpoint": name_of(job, row["step"]),
        "fine_tuning_job_id": row["job"],
        "step_number": row["step"],
        "metrics": {name: value for name, value in json.loads(row["metrics"]).items() if value is not None},
    }


def page_object(objects: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A list of at most `limit`, from one row more."""
    shown = objects[:limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, "has_more": len(objects) > limit, **ends}


def error_object(message: str, param: str | None, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}

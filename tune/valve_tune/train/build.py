"""From a job to its model: written-out tiles where the family is known, autograd inside tiles elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from valve_tune.base.consent import find
from valve_tune.base.copies import move_module
from valve_tune.base.memory import StashMemory
from valve_tune.base.own import LoadedModel, OwnCopy
from valve_tune.base.residency import HostWindow
from valve_tune.base.shared import SharedCopy
from valve_tune.base.weights import BadBase, FrozenWeights, read_folder
from valve_tune.model.adapter import Adapter
from valve_tune.model.autograd import AutogradModel
from valve_tune.model.explicit import EMBEDDING, ExplicitModel, adapter_sites
from valve_tune.model.family import obstacle, shape_of
from valve_tune.model.interface import TileModel
from valve_tune.model.names import short_targets
from valve_tune.train.pool import NoPool, borrow
from valve_tune.train.spec import JobSpec


def open_model(spec: JobSpec, *, weights: FrozenWeights | None = None, memory: StashMemory | None = None) -> TileModel:
    """`weights` is a base that is there already: shared with an engine, or a window over a host copy. `memory` is where
    the stash lives; without one it is what the job asked for.
    """
    if memory is None and spec.stash_mib:
        if not torch.cuda.is_available():
            raise NoPool("without a GPU there is no pool to borrow from")
        memory = borrow(spec.stash_mib)
    folder, dtype = Path(spec.model), getattr(torch, spec.dtype)
    config = config_of(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def make(sites: dict[str, tuple[int, int]]) -> Adapter:
        return Adapter(sites, rank=spec.lora_r, alpha=spec.lora_alpha, seed=spec.seed).to(device)

    if obstacle(config, spec.max_length):
        if weights is not None:
            raise BadBase(f"{folder}: {obstacle(config, spec.max_length)}, so it needs an own copy of its weights")
        for name in ("resident_layers", "share_weights"):
            if getattr(spec, name):
                raise BadBase(f"{name}: {obstacle(config, spec.max_length)}, so its weights are its own; leave it out")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        move_module(model, device)
        return AutogradModel(model, LoadedModel(model.state_dict()), spec.target_modules, make, memory)
    layers = config.num_hidden_layers
    if weights is None and spec.share_weights:
        weights = shared_base(spec, config, device)
    elif weights is None and spec.resident_layers:
        weights = HostWindow(read_folder(folder, dtype), layers, spec.resident_layers, device, memory=memory)
    base = weights or OwnCopy.read(folder, layers, dtype, device)
    adapter = make(adapter_sites(config, short_targets(spec.target_modules)))
    return ExplicitModel(config, base, adapter, memory=memory)


def shared_base(spec: JobSpec, config: Any, device: str) -> SharedCopy:
    if device != "cpu":
        raise BadBase("share_weights: on a GPU weights are not shared; leave it out")
    path, permit = find(spec.share_weights)
    try:
        base = SharedCopy(path, shape_of(config), permit)
    except (BadBase, OSError, ValueError, KeyError, TypeError) as error:
        raise BadBase(f"share_weights: {error}") from error
    held = base.outer[EMBEDDING].dtype
    if held != getattr(torch, spec.dtype):
        raise BadBase(f"share_weights: the file holds {held}, the job's dtype is {spec.dtype}")
    return base


def config_of(folder: Path) -> Any:
    try:
        json.loads((folder / "config.json").read_text())
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise BadBase(f"{folder / 'config.json'}: {error}") from error

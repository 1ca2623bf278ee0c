"""From a job to its model: written-out tiles where the family is known, autograd inside tiles elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from valve_tune.base.consent import find
from valve_tune.base.copies import move_module
from valve_tune.base.daemon import DaemonCopy, Wanted, WeightDaemon
from valve_tune.base.memory import StashMemory
from valve_tune.base.own import LoadedModel, OwnCopy
from valve_tune.base.residency import HostWindow
from valve_tune.base.shared import SharedCopy
from valve_tune.base.weights import BadBase, FrozenWeights, read_folder, shapes
from valve_tune.model.adapter import Adapter
from valve_tune.model.autograd import AutogradModel
from valve_tune.model.explicit import ExplicitModel, adapter_sites
from valve_tune.model.family import obstacle
from valve_tune.model.hollow import around
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

    if weights is None and spec.share_weights:
        weights = shared_base(spec, device)
    if obstacle(config, spec.max_length):
        model, weights = foreign(spec, config, weights, device)
        return AutogradModel(model, weights, spec.target_modules, make, memory)
    layers = config.num_hidden_layers
    if weights is None and spec.resident_layers:
        weights = HostWindow(read_folder(folder, dtype), layers, spec.resident_layers, device, memory=memory)
    base = weights or OwnCopy.read(folder, layers, dtype, device)
    adapter = make(adapter_sites(config, short_targets(spec.target_modules)))
    return ExplicitModel(config, base, adapter, memory=memory)


def foreign(spec: JobSpec, config: Any, weights: FrozenWeights | None, device: str) -> tuple[Any, FrozenWeights]:
    """A model of another family, over its own copy or over a shared one."""
    why = obstacle(config, spec.max_length)
    if spec.resident_layers:
        raise BadBase(f"resident_layers: {why}, so the model needs all its weights at once; leave it out")
    if isinstance(weights, DaemonCopy | SharedCopy):
        return around(config, weights.tensors), weights
    if weights is not None:
        raise BadBase(f"{spec.model}: {why}, so it needs an own copy of its weights")
    model = AutoModelForCausalLM.from_pretrained(spec.model, dtype=getattr(torch, spec.dtype), local_files_only=True)
    move_module(model, device)
    return model, LoadedModel(model.state_dict())


def shared_base(spec: JobSpec, device: str) -> DaemonCopy | SharedCopy:
    """Of a service that consents: the file that it maps, or what its weight daemon holds."""
    path, permit = find(spec.share_weights)
    folder, dtype = Path(spec.model), getattr(torch, spec.dtype)
    try:
        sizes = shapes(folder)
        if path.is_socket():
            daemon = WeightDaemon(path, permit.covers)
            here = torch.device(device, torch.cuda.current_device() if device == "cuda" else None)
            wanted = Wanted(folder=folder, config=config_of(folder), dtype=dtype, device=here)
            return DaemonCopy(daemon, wanted, sizes, permit)
        if device != "cpu":
            raise BadBase("on a GPU only what a weight daemon holds is shared, not a file")
        base = SharedCopy(path, sizes, permit)
    except (BadBase, OSError, ValueError, KeyError, TypeError) as error:
        raise BadBase(f"share_weights: {str(error).removeprefix('share_weights: ')}") from error
    held = next(iter(base.tensors.values())).dtype
    if held != dtype:
        raise BadBase(f"share_weights: the file holds {held}, the job's dtype is {spec.dtype}")
    return base


def config_of(folder: Path) -> Any:
    try:
        json.loads((folder / "config.json").read_text())
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise BadBase(f"{folder / 'config.json'}: {error}") from error

"""vLLM's weight daemon (0.30 and later): it compares a key of the base with its own and names what differs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from valve_tune.base.weights import BadBase, Tensors

if TYPE_CHECKING:
    from valve_tune.base.daemon import Wanted, WeightDaemon

SEVERAL = "is one of several GPUs' daemons: a base is shared from one GPU alone (TP = PP = DP = 1)"
QUANTIZED = "holds quantized weights, which only its engine reads"
WHY = {
    "tp_size": SEVERAL,
    "tp_rank": SEVERAL,
    "pp_size": SEVERAL,
    "pp_rank": SEVERAL,
    "dp_size": SEVERAL,
    "dp_rank": SEVERAL,
    "quantization": QUANTIZED,
    "quant_config_hash": QUANTIZED,
    "dtype": "holds another type than the job's --dtype",
    "vllm_version": "is of another vLLM than this environment's",
    "checkpoint": "holds another base than --model (start it with that folder)",
    "model_arch": "holds another base than --model",
    "revision": "was started with --revision: start it with a folder",
    "is_draft": "holds a draft model",
}


def ask(daemon: WeightDaemon, wanted: Wanted) -> Tensors:
    from vllm.model_executor.model_loader.weight_cache import protocol

    asked: Any = SimpleNamespace(  # what a key is made of, of vLLM's own configuration of the model
        hf_config=wanted.config,
        model=str(wanted.folder),
        dtype=wanted.dtype,
        quantization=None,
        quantization_config=None,
        revision=None,
    )
    key = protocol.WeightCacheKey.from_model_config(asked, tp_size=1, tp_rank=0)
    with daemon.connect() as link:
        protocol.send_msg(link, {"cmd": "get_state", "cache_config": key})
        said = protocol.recv_msg(link)
    if said.get("status") == "mismatch":
        differ = [str(name) for name in said.get("fields", ())]
        reasons = dict.fromkeys(WHY.get(name, f"differs in {name}") for name in differ)
        raise BadBase(f"{daemon.path}: the daemon {'; it '.join(reasons) or 'refuses'}")
    if said.get("status") != "ok":
        raise BadBase(f"{daemon.path}: {said.get('message')}")
    index = 0
    if wanted.device.type == "cuda":
        index = torch.cuda.current_device()
        if said.get("gpu_uuid") not in (None, protocol.get_current_device_uuid()):
            raise BadBase(f"{daemon.path}: its weights are on another GPU ({said['gpu_uuid']}) than this job's")
    return {name: entry.rebuild(index) for name, entry in said["entries"].items() if entry.kind == "param"}

"""SGLang's weight daemon (0.5.23). It tells each client what it holds; a client must then say the same."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from valve_tune.base.weights import BadBase, Tensors

if TYPE_CHECKING:
    from valve_tune.base.daemon import Wanted, WeightDaemon


def ask(daemon: WeightDaemon, wanted: Wanted) -> Tensors:
    from sglang.srt.weight_cache import protocol, transport

    with daemon.connect() as link:
        protocol.send_msg(link, {"type": "query_config"})
        config = _settled(daemon, protocol.recv_msg(link))["config"]
    why = obstacle(config, wanted)
    if why:
        raise BadBase(f"{daemon.path}: the daemon {why}")
    with daemon.connect() as link:
        protocol.send_msg(link, {"type": "fetch_state", "config": config})
        said = _settled(daemon, protocol.recv_msg(link))
        way = transport.get_client_transport_backend(said.get("transport_backend"))
        said = way.recv_fetch_state_response(link, said)
    return {name: way.import_tensor(entry) for name, entry in said["entries"].items() if entry.get("is_param", True)}


def _settled(daemon: WeightDaemon, said: dict[str, Any]) -> dict[str, Any]:
    if said.get("status") != "ok":
        raise BadBase(f"{daemon.path}: {said.get('message') or said.get('status')}")
    return said


def obstacle(config: dict[str, Any], wanted: Wanted) -> str:
    """Why what the daemon holds is not the job's base, as this process could read it."""
    sizes = {name: config[name] for name in ("tp_size", "pp_size", "dp_size", "ep_size") if config.get(name, 1) != 1}
    if sizes:
        several = ", ".join(f"{name} {size}" for name, size in sizes.items())
        return f"is one of several GPUs' daemons ({several}): a base is shared from one GPU alone"
    if config["quant_method"]:
        return f"holds weights quantized by {config['quant_method']}, which only its engine reads"
    if config["dtype"] != str(wanted.dtype):
        return f"holds {config['dtype']}, the job's dtype is {wanted.dtype}"
    if os.path.realpath(config["model_path"]) != os.path.realpath(wanted.folder):
        return f"holds {config['model_path']}, another base than --model ({wanted.folder})"
    if config["torch_version"] != str(torch.__version__):
        return f"runs torch {config['torch_version']}, this environment has {torch.__version__}"
    return ""

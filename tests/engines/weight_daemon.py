"""An engine's weight daemon without a card: `vllm|sglang MODEL SOCKET FOLDER`. Its code is the engine's own, from how
it lays out and exports a model (vLLM loads it itself) to how it answers; but its tensors are CPU memory that other
processes map, where a card's would be CUDA IPC handles.

FOLDER/fault names one thing that it says wrongly of itself. FOLDER/alter makes it overwrite one word of its weights.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import torch
import torch.multiprocessing

ENGINE, MODEL, SOCKET, FOLDER = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])
torch.multiprocessing.set_sharing_strategy("file_system")  # the one that a process which is no child can open


def fault() -> str:
    try:
        return (FOLDER / "fault").read_text()
    except OSError:
        return ""


def serve_alterations(weight: torch.Tensor) -> None:
    def watch() -> None:
        while True:
            if (FOLDER / "alter").exists():
                with torch.no_grad():
                    weight.view(-1)[weight.numel() // 2] += 1
                (FOLDER / "alter").unlink()
            time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()


def vllm() -> None:
    import dataclasses
    import pickle
    from multiprocessing.reduction import ForkingPickler

    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.weight_cache import daemon, protocol
    from vllm.utils.torch_utils import set_default_torch_dtype

    def send(link: socket.socket, said: object) -> None:
        payload = bytes(ForkingPickler.dumps(said, pickle.HIGHEST_PROTOCOL))  # a CPU tensor as a name, not as its bytes
        link.sendall(protocol._LEN_STRUCT.pack(len(payload)) + payload)

    daemon.send_msg, daemon.get_current_device_uuid = send, lambda: "no-card"
    wrong = {
        "tensor parallel": {"tp_size": 2},
        "pipeline": {"pp_size": 2},
        "quantized": {"quantization": "fp8"},
        "type": {"dtype": "torch.bfloat16"},
        "base": {"checkpoint": "0"},
        "version": {"vllm_version": "0.0"},
    }

    class Played(daemon.WeightCacheDaemon):
        @property
        def _socket_path(self) -> str:
            return SOCKET

        def _handle_connection(self, link: socket.socket) -> None:
            self.cache_config = dataclasses.replace(right, **wrong.get(fault(), {}))
            super()._handle_connection(link)

    config = EngineArgs(model=MODEL, dtype="float32", enforce_eager=True, max_model_len=512).create_engine_config()
    at = f"file://{FOLDER}/rendezvous"
    init_distributed_environment(world_size=1, rank=0, distributed_init_method=at, local_rank=0, backend="gloo")
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)
        one = Played(config, 0, 0, at, socket_dir=str(FOLDER))
        right = one.cache_config
        loader = get_model_loader(config.load_config)
        with set_default_torch_dtype(torch.float32):
            one.model = loader.create_model(config, config.model_config)
            loader.load_weights(one.model, config.model_config)
    one.model.requires_grad_(False).share_memory()
    serve_alterations(one.model.get_parameter("model.layers.1.self_attn.qkv_proj.weight"))
    one.serve_forever()


def sglang() -> None:
    from sglang.srt.weight_cache import daemon, protocol
    from transformers import AutoModelForCausalLM

    wrong = {
        "tensor parallel": {"tp_size": 2},
        "pipeline": {"pp_size": 2},
        "quantized": {"quant_method": "fp8"},
        "type": {"dtype": "torch.bfloat16"},
        "base": {"model_path": "another/base"},
        "version": {"torch_version": "0.0"},
    }

    class Played(daemon.WeightCacheDaemon):
        def __init__(self) -> None:
            """Without a card the engine's own would end here."""
            self.model = as_sglang(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32))
            self.gpu_id, self.socket_path, self.ready_path = 0, SOCKET, f"{FOLDER}/ready"
            self.state_entries, self.preloaded_weights_bytes, self._running = {}, 0, False
            zero = dict.fromkeys(protocol.CacheConfig.__struct_fields__, 0)
            ones = dict.fromkeys(("tp_size", "pp_size", "dp_size", "ep_size", "moe_dp_size", "attn_dp_size"), 1)
            said = {"model_path": MODEL, "quant_method": "", "quant_config_hash": "", "dtype": "torch.float32"}
            self.right = {**zero, **ones, **said, **protocol.compute_env_stamp()}
            self._export_state()

        def _handle_connection(self, link: socket.socket) -> None:
            self.config = protocol.CacheConfig.from_dict(self.right | wrong.get(fault(), {}))
            super()._handle_connection(link)

    one = Played()
    one.config = protocol.CacheConfig.from_dict(one.right)
    serve_alterations(one.model.get_parameter("model.layers.1.self_attn.qkv_proj.weight"))
    one.serve()


def as_sglang(model: torch.nn.Module) -> torch.nn.Module:
    """Fused and padded as SGLang's Llama is."""
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for module in list(model.modules()):
        for fused, names in parts.items():
            if all(hasattr(module, name) for name in names):
                weight = torch.cat([module.get_submodule(name).weight for name in names])
                whole = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
                whole.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
                for name in names:
                    delattr(module, name)
                module.add_module(fused, whole)
    for module in (model.get_submodule("model.embed_tokens"), model.get_submodule("lm_head")):
        module.weight = torch.nn.Parameter(torch.nn.functional.pad(module.weight.detach(), (0, 0, 0, 64)))
    return model.requires_grad_(False)


if __name__ == "__main__":
    os.umask(0o077)
    {"vllm": vllm, "sglang": sglang}[ENGINE]()

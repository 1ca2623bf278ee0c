"""The machine model: cards, language models, and the time of one engine iteration. Every number is a parameter.

An iteration takes max(weights read, linear layers) + fixed + b * decoding sequences + c * their context + attention of
the prompt chunk. It needs no table for a model it has not seen; how far it is from those of the Vidur project says
`valve replay machine` (docs/results/replay/machine.md): about right on one or two GPUs, too fast on eight.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
MODEL_ERROR = (
    "Machine model against measured layer times on H100 (medians): decoding 5 to 12 % too fast on one GPU, up to 27 % "
    "on eight; prompts up to 8 % too slow on one, up to 34 % too fast on eight. Figures here carry that error."
)
"""On every page of the lab; `valve replay machine` measures it, and a test compares."""
MS = 1_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    memory_gib: float
    """Usable after the driver's share."""
    bandwidth_bytes_s: float
    flops: float
    """Dense bf16 peak."""
    linear_efficiency: float
    """Share of peak that the matrix products of a prompt reach."""
    attention_efficiency: float = 0.4
    stream_efficiency: float = 0.85
    """Share of the bandwidth that reading weights reaches."""
    kv_efficiency: float = 0.75
    seq_ns: float
    """Per decoding sequence and iteration: sampling, norms, small kernels."""
    all_reduce_ns: float = 15_000.0
    layer_ns: float = 0.0
    """Per layer and iteration: norms, rotary embedding, the start of small kernels. Zero: the efficiencies hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    params: float
    layers: int
    hidden: int
    weights_gib: float
    kv_kib_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What the simulator needs of one engine; times per iteration on one rank, in ns."""

    base_ns: float
    seq_ns: float
    context_token_ns: float
    prefill_token_ns: float
    attention_pair_ns: float
    fixed_ns: float
    budget_tokens: int
    max_seqs: int


H100 = Gpu(name="H100", memory_gib=78.0, bandwidth_bytes_s=3.35e12, flops=989e12, linear_efficiency=0.58, seq_ns=11_000)
H200 = Gpu(name="H200", memory_gib=138.0, bandwidth_bytes_s=4.8e12, flops=989e12, linear_efficiency=0.58, seq_ns=11_000)
A100 = Gpu(name="A100", memory_gib=78.0, bandwidth_bytes_s=2.04e12, flops=312e12, linear_efficiency=0.72, seq_ns=29_000)
GPUS = {gpu.name: gpu for gpu in (H100, H200, A100)}


def _model(name: str, params: float, layers: int, hidden: int, weights_gb: float, kv_kib: float) -> Model:
    return Model(
        name=name,
        params=params,
        layers=layers,
        hidden=hidden,
        weights_gib=weights_gb * 1e9 / GIB,
        kv_kib_per_token=kv_kib,
    )


MODELS = {
    model.name: model
    for model in (
        _model("1B", 1.24e9, 16, 2048, 2.5, 32),
        _model("3B", 3.21e9, 28, 3072, 6.4, 112),
        _model("8B", 8.03e9, 32, 4096, 16.1, 128),
        _model("14B", 14.8e9, 48, 5120, 29.5, 192),
        _model("32B", 32.8e9, 64, 5120, 65.5, 256),
        _model("70B", 70.6e9, 80, 8192, 141.0, 320),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How engines run on the machine."""

    gpu: Gpu = H100
    memory_utilization: float = 0.92
    activation_gib: float = 3.0
    """Per engine and GPU: activations, CUDA graphs, workspace."""
    lm_head_ns: float = 0.4 * MS
    block_tokens: int = 16
    handle_mib: int = 64
    online_budget_tokens: int = 2048
    online_max_seqs: int = 256
    offline_max_seqs: int = 256


def timing(model: Model, tp: int, settings: Settings, *, budget_tokens: int, max_seqs: int) -> Timing:
    """Iteration timing of `model` over `tp` ranks."""
    gpu = settings.gpu
    all_reduce_ns = 2 * model.layers * gpu.all_reduce_ns if tp > 1 else 0.0
    return Timing(
        base_ns=model.weights_gib * GIB / (tp * gpu.bandwidth_bytes_s * gpu.stream_efficiency) * 1e9,
        seq_ns=gpu.seq_ns,
        context_token_ns=model.kv_kib_per_token * 1024 / (tp * gpu.bandwidth_bytes_s * gpu.kv_efficiency) * 1e9,
        prefill_token_ns=2 * model.params / (tp * gpu.flops * gpu.linear_efficiency) * 1e9,
        attention_pair_ns=4 * model.layers * model.hidden / (tp * gpu.flops * gpu.attention_efficiency) * 1e9,
        fixed_ns=settings.lm_head_ns + all_reduce_ns + model.layers * gpu.layer_ns,
        budget_tokens=budget_tokens,
        max_seqs=max_seqs,
    )


def pool_handles(weights_gib: float, engines: int, settings: Settings) -> int:
    """Handles per GPU left for KV when `weights_gib` of weights lie on each GPU."""
    usable = settings.gpu.memory_gib * settings.memory_utilization
    left_gib = usable - weights_gib - engines * settings.activation_gib
    return max(0, int(left_gib * 1024 / settings.handle_mib))


def blocks_per_handle(model: Model, tp: int, settings: Settings) -> int:
    """Blocks of one KV layout (block-outermost) in a handle, at least one."""
    block_bytes = model.kv_kib_per_token * 1024 * settings.block_tokens / tp
    return max(1, int(settings.handle_mib * (1 << 20) / block_bytes))

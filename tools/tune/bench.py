"""`python tools/tune/bench.py`: the written-out path against peft + transformers on this CPU, paired, as a table.

Speed against peft with gradient checkpointing at equal batch; activation bytes against peft without; what it costs to
suspend after every layer. Each figure is a median of ratios of runs taken in turn.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from transformers import AutoModelForCausalLM, LlamaConfig
from valve_tune.base.own import LoadedModel, OwnCopy
from valve_tune.model.adapter import Adapter
from valve_tune.model.autograd import AutogradModel, nodes
from valve_tune.model.dropout import Draw
from valve_tune.model.explicit import ExplicitModel, ExplicitPass, adapter_sites
from valve_tune.model.interface import nothing
from valve_tune.model.names import short_targets
from valve_tune.options import option
from valve_tune.serve.control import FolderControl
from valve_tune.serve.folder import GO, JobFolder
from valve_tune.tiles.grid import Grid, Phase, TileShape
from valve_tune.tiles.orders import layer_major
from valve_tune.train.batch import MicroBatch

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Bench:
    """One model of random weights in two hands."""

    def __init__(self, hidden: int, layers: int, tokens: int, rows: int, targets: list[str]) -> None:
        torch.manual_seed(0)
        self.config = LlamaConfig(
            vocab_size=2048,
            hidden_size=hidden,
            intermediate_size=hidden * 7 // 2,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 256),
            max_position_embeddings=tokens,
        )
        base = AutoModelForCausalLM.from_config(self.config, attn_implementation="sdpa").requires_grad_(False)
        adapter = Adapter(adapter_sites(self.config, short_targets(targets)), rank=8, alpha=16)
        self.ours = ExplicitModel(self.config, OwnCopy(base.state_dict(), layers), adapter)
        self.kept_mlp = ExplicitModel(self.config, self.ours.weights, adapter, again_mlp=False)
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
        self.peft = get_peft_model(copy.deepcopy(base), lora)
        self.checkpointed = get_peft_model(copy.deepcopy(base), lora)
        self.checkpointed.enable_input_require_grads()
        self.checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
        self.checkpointed.train()
        ids = np.random.default_rng(0).integers(0, 2048, (rows, tokens))
        one, where = np.ones_like(ids), np.tile(np.arange(tokens), (rows, 1))
        self.batch = MicroBatch(input_ids=ids, labels=ids, segments=one, positions=where)
        self.grid = Grid(layers=layers, tokens=tokens)
        self.foreign: AutogradModel | None = None

    def begin(self, model: ExplicitModel | AutogradModel, grid: Grid | None = None) -> Any:
        scale, draw = 1 / self.batch.label_count, Draw(seed=0, step=0, sequence=0)
        return model.start(self.batch, scale=scale, draw=draw, grid=grid or self.grid)

    def cut(self, forward: TileShape, backward: TileShape) -> Grid:
        return Grid(layers=self.grid.layers, tokens=self.grid.tokens, forward=forward, backward=backward)

    def explicit(self, model: ExplicitModel) -> ExplicitPass:
        work: ExplicitPass = self.begin(model)
        for phase in Phase:
            for tile in layer_major(self.grid, phase):
                work.run(tile)
        work.gradients()
        return work

    def autograd(self, model: Any) -> None:
        ids = torch.from_numpy(self.batch.input_ids)
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    def autograd_bytes(self) -> int:
        """Distinct bytes that plain autograd holds when its forward ends, without weights."""
        weights = {each.untyped_storage().data_ptr() for each in (*self.peft.parameters(), *self.peft.buffers())}
        held: dict[int, int] = {}
        alive: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                held[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)  # so that no address is used twice
            return tensor

        ids = torch.from_numpy(self.batch.input_ids)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.peft(input_ids=ids, labels=ids, use_cache=False)
        return sum(held.values())

    def backward_seconds(self, suspended: bool) -> float:
        """From the first tile of backward to the last; suspended: another thread lets it go on after each layer."""
        grid = self.cut(TileShape(), TileShape(layers=1 if suspended else 0))
        work = self.begin(self.ours, grid)
        for tile in layer_major(grid, Phase.FORWARD):
            work.run(tile)
        suspend = Suspender().suspend if suspended else nothing
        began = time.thread_time()
        for tile in layer_major(grid, Phase.BACKWARD):
            suspend()
            work.run(tile)
        return time.thread_time() - began

    def foreign_backward(self, ask: Callable[[], None]) -> float:
        """CPU time of a backward by autograd that is one tile, asked before each operator."""
        if self.foreign is None:
            base = copy.deepcopy(self.peft.base_model.model)
            for module in [*base.modules()]:
                for name, each in [*module.named_children()]:
                    if isinstance(each, LoraLinear):
                        setattr(module, name, each.base_layer)
            self.foreign = AutogradModel(base, LoadedModel({}), MODULES, lambda sites: Adapter(sites, rank=8, alpha=16))
        grid = self.cut(TileShape(layers=0), TileShape(layers=0))
        work = self.begin(self.foreign, grid)
        up, down = (layer_major(grid, phase) for phase in Phase)
        for tile in up:
            work.run(tile)

        def backward() -> None:
            for tile in down:
                work.run(tile, ask)

        return cpu_seconds(backward)


class Suspender:
    """A thread that answers each suspension, as long as the program lives: what a pause of no length costs."""

    def __init__(self) -> None:
        self._asked, self._go = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while self._asked.acquire():
            self._go.release()

    def suspend(self) -> None:
        self._asked.release()
        self._go.acquire()


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of this process: others on the machine do not count, threads of torch do."""
    began = time.process_time()
    work()
    return time.process_time() - began


def paired(first: Callable[[], float], second: Callable[[], float], rounds: int) -> tuple[float, float]:
    """(median of first / second, median of second). In turn, the order swapped each round; one round to warm up."""
    ratios, bases = [], []
    for number in range(rounds + 1):
        if number % 2:
            one, other = first(), second()
        else:
            other, one = second(), first()
        ratios.append(one / other)
        bases.append(other)
    return statistics.median(ratios[1:]), statistics.median(bases[1:])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    option(parser, "--hidden", 1024, "The width of the model, a number of elements.")
    option(parser, "--layers", 6, "The number of layers.")
    option(parser, "--tokens", 256, "The tokens of a row.")
    option(parser, "--rows", 2, "The number of rows in a batch.")
    option(parser, "--rounds", 5, "The number of paired runs.")
    option(parser, "--threads", 1, "The number of CPU threads.")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(chosen.threads)
    failed = False
    for label, targets in (("all linears", MODULES), ("q and v", ["q_proj", "v_proj"])):
        bench = Bench(chosen.hidden, chosen.layers, chosen.tokens, chosen.rows, targets)
        speed, base = paired(
            lambda bench=bench: cpu_seconds(lambda: bench.explicit(bench.ours)),  # type: ignore[misc]
            lambda bench=bench: cpu_seconds(lambda: bench.autograd(bench.checkpointed)),  # type: ignore[misc]
            chosen.rounds,
        )
        bytes_ = bench.autograd_bytes()
        lean = bench.explicit(bench.ours)
        full = bench.explicit(bench.kept_mlp)
        held = (lean.stash.peak_bytes + lean.flow.nbytes) / bytes_
        print(f"{label}: CPU time / peft with checkpointing {speed:.3f} (budget 1; peft {base:.2f} s)")
        print(f"{label}: kept bytes / plain autograd {held:.3f} (budget 0.30; autograd {bytes_ / 1e6:.1f} MB)")
        print(f"{label}: the same with gate and up kept {(full.stash.peak_bytes + full.flow.nbytes) / bytes_:.3f}")
        failed |= speed > 1 or held > 0.30
    cost, whole = paired(lambda: bench.backward_seconds(True), lambda: bench.backward_seconds(False), chosen.rounds)
    one = suspension_seconds()
    share = one * chosen.layers / whole
    print(f"suspending after every layer, paired: CPU time x {cost:.4f} (unsplit backward {whole:.2f} s)")
    print(f"one suspension: {one * 1e6:.1f} us of CPU, {100 * share:.4f} % of the backward (budget 0.5 %)")
    asked = foreign_suspension(bench, chosen.rounds)
    return int(failed or share > 0.005 or asked > 0.005)


def foreign_suspension(bench: Bench, rounds: int) -> float:
    """What asking before every operator costs a backward of a model that is not ours, as a share of it."""
    with tempfile.TemporaryDirectory() as folder:
        home = JobFolder(folder)
        home.want(GO)
        control, count = FolderControl(home), 0

        def ask() -> None:
            nonlocal count
            count += 1
            control.answer()

        cost, whole = paired(lambda: bench.foreign_backward(ask), lambda: bench.foreign_backward(nothing), rounds)
        asks = count // (rounds + 1)
        once = question_seconds(ask)
    share = asks * once / whole
    print(
        f"another's model, asked before each operator, paired: CPU time x {cost:.4f} (unasked backward {whole:.2f} s)"
    )
    print(f"{asks} questions of {once * 1e6:.2f} us, {100 * share:.4f} % of the backward (budget 0.5 %)")
    return share


def question_seconds(ask: Callable[[], None], count: int = 2000) -> float:
    """CPU time of one question before one operator, the way out of the graph included: in a chain of tiny ones."""

    def chain(hooked: bool) -> float:
        last = first = torch.ones(1, requires_grad=True)
        for _ in range(count):
            last = last + 1
        if hooked:
            for node in nodes(last.grad_fn):
                node.register_prehook(lambda _: ask())
        return cpu_seconds(lambda: torch.autograd.grad(last, first))

    return max(0.0, statistics.median(chain(True) - chain(False) for _ in range(9))) / count


def suspension_seconds(count: int = 5000) -> float:
    """CPU time of one suspension, both threads: too little to be seen in a paired run."""
    turns = Suspender()
    began = time.process_time()
    for _ in range(count):
        turns.suspend()
    return (time.process_time() - began) / count


if __name__ == "__main__":
    raise SystemExit(main())

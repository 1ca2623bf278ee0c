"""What stands before the weights of an engine's daemon: whose socket it is, which rows are whose, what has changed.

How real vLLM and SGLang answer is in tests/engines/test_shared_weights.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs
import oracle
import pytest
import test_autograd
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_bases import fused, sizes_of
from test_share import Valved
from transformers import AutoModelForCausalLM
from valve_tune.base.consent import NotShared, find
from valve_tune.base.daemon import WeightDaemon
from valve_tune.base.own import OwnCopy
from valve_tune.base.processes import sockets_of
from valve_tune.base.sglang_daemon import obstacle
from valve_tune.base.shared import publish
from valve_tune.base.views import Seal, as_checkpoint
from valve_tune.base.weights import BadBase, BaseChanged, read_folder
from valve_tune.model.hollow import around
from valve_tune.train.build import open_model, shared_base
from valve_tune.train.guard import stand
from valve_tune.train.job import Trainer
from valve_tune.train.report import End

NAME = "vllm_weight_cache_0.sock"


@pytest.fixture
def listening(tmp_path: Path):
    """This process listens as a weight daemon does."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / NAME))
        (tmp_path / NAME).chmod(0o600)
        server.listen()
        yield tmp_path / NAME


@pytest.fixture
def valved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Valved:
    return Valved(tmp_path / "run", monkeypatch)


def test_the_daemon_of_a_service_is_found_by_where_its_processes_listen(valved: Valved, listening: Path) -> None:
    valved.says(True)
    assert find("chat")[0] == listening
    listening.with_name("other").write_text("")
    assert list(sockets_of([os.getpid()])) == [listening]


def test_a_descriptor_closed_meanwhile_never_hides_a_socket(tmp_path: Path) -> None:
    """The listing's own descriptor takes the lowest free number, and is closed when the links are read."""
    with open(os.devnull) as below, socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / NAME))
        server.listen()
        assert below.fileno() < server.fileno()
        below.close()
        assert list(sockets_of([os.getpid()])) == [tmp_path / NAME]


def test_the_daemon_of_a_service_without_consent_is_never_asked(valved: Valved, listening: Path) -> None:
    valved.says(False)
    with pytest.raises(NotShared, match="does not consent"):
        find("chat")


def test_one_base_on_several_gpus_is_refused_by_name(valved: Valved, listening: Path) -> None:
    valved.says(True)
    with socket.socket(socket.AF_UNIX) as second:
        second.bind(str(listening.with_name("sglang_weight_cache_1.sock")))
        second.listen()
        with pytest.raises(NotShared, match="2 weight daemons"):
            find("chat")


def test_a_draft_models_daemon_is_never_taken_for_the_bases(valved: Valved, listening: Path) -> None:
    valved.says(True)
    with socket.socket(socket.AF_UNIX) as second:
        second.bind(str(listening.with_name("vllm_weight_cache_0_draft.sock")))
        second.listen()
        assert find("chat")[0] == listening


@pytest.mark.parametrize("fault", ["open to others", "a link", "no socket", "another process", "nobody"])
def test_a_socket_that_is_not_the_services_own_is_never_read_from(listening: Path, fault: str) -> None:
    path = listening
    if fault == "open to others":
        path.chmod(0o666)
    elif fault == "a link":
        path = listening.with_name("link.sock")
        path.symlink_to(listening)
    elif fault == "no socket":
        path = listening.with_name("file.sock")
        path.write_text("")
        path.chmod(0o600)
    elif fault == "nobody":
        path = listening.with_name("gone.sock")
    with pytest.raises(NotShared):
        WeightDaemon(path, lambda pid: fault != "another process").connect()


def test_a_daemon_that_died_is_never_taken_for_alive_though_its_number_came_again(tmp_path: Path) -> None:
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({str(tmp_path / NAME)!r}); s.listen(); "
    server = subprocess.Popen(
        [sys.executable, "-c", code + "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        umask=0o177,
    )
    assert server.stdout is not None
    server.stdout.readline()
    daemon = WeightDaemon(tmp_path / NAME, lambda pid: pid == server.pid)
    daemon.connect().close()
    daemon.check()
    server.kill()
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has asked how it ended
    with pytest.raises(NotShared, match="has ended"):
        daemon.check()
    server.communicate()
    with pytest.raises(NotShared, match="has ended"):
        daemon.check()
    daemon.pid = os.getpid()  # as if it had got the number
    with pytest.raises(NotShared, match="has ended"):
        daemon.check()


def test_without_the_engine_the_way_to_its_environment_is_said(valved: Valved, listening: Path, tmp_path: Path) -> None:
    valved.says(True)
    spec = jobs.job(jobs.model_folder(tmp_path / "base"), tmp_path / "out", share_weights="chat")
    with pytest.raises(BadBase, match=r"share_weights: .*environment of vllm.*VALVE_TUNE_PYTHON"):
        shared_base(spec, "cpu")


def test_a_quantized_base_is_refused_before_the_daemon_is_asked(
    valved: Valved, listening: Path, tmp_path: Path
) -> None:
    valved.says(True)
    base = jobs.model_folder(tmp_path / "base")
    config = base / "config.json"
    config.write_text(config.read_text().replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1))
    with pytest.raises(BadBase, match="quantized base is not shared"):
        shared_base(jobs.job(base, tmp_path / "out", share_weights="chat"), "cpu")


SAYS: dict[str, Any] = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "ep_size": 1, "quant_method": "", "model_path": "/b"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"tp_size": 2}, "tp_size 2"),
        ({"ep_size": 4}, "ep_size 4"),
        ({"quant_method": "fp8"}, "quantized by fp8"),
        ({"dtype": "torch.float16"}, "the job's dtype is"),
        ({"model_path": "/c"}, "another base than --model"),
        ({"torch_version": "1.0"}, "runs torch 1.0"),
    ],
)
def test_what_an_sglang_daemon_says_of_itself_is_held_against_the_job(change: dict[str, Any], said: str) -> None:
    class Wanted:
        folder, dtype = Path("/b"), torch.bfloat16

    config = {**SAYS, "dtype": "torch.bfloat16", "torch_version": str(torch.__version__), **change}
    found = obstacle(config, Wanted)  # type: ignore[arg-type]
    assert bool(found) == bool(said)
    assert said in found


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_rows_of_an_engines_matrices_are_the_checkpoints_tensors(name: str) -> None:
    model = oracle.make(name, torch.float32)
    views = as_checkpoint(fused(model), sizes_of(model))
    assert views.keys() == model.state_dict().keys()
    assert all(torch.equal(views[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("fault", ["half of a matrix", "one is missing", "another width"])
def test_what_is_no_view_of_the_checkpoint_is_refused_by_name(fault: str) -> None:
    model = oracle.make("llama", torch.float32)
    held, name = fused(model), "model.layers.1.self_attn.qkv_proj.weight"
    if fault == "one is missing":
        del held[name]
    else:
        held[name] = held[name][:16] if fault == "half of a matrix" else held[name][:, :16]
    with pytest.raises(BadBase, match=r"model\.layers\.1\.self_attn"):
        as_checkpoint(held, sizes_of(model))


@given(st.integers(0, 3 * 1000 - 1), st.integers(0, 31), st.sampled_from([torch.float32, torch.bfloat16]))
def test_no_change_of_a_bit_is_ever_missed(place: int, bit: int, dtype: torch.dtype) -> None:
    tensors = {"w": torch.arange(3000).to(dtype).view(3, 1000)}
    seal = Seal(tensors, "here")
    seal.check()
    words = tensors["w"].view(-1).view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
    words[place] ^= (1 << (bit % (8 * words.itemsize))) if bit % (8 * words.itemsize) != 8 * words.itemsize - 1 else 1
    with pytest.raises(BaseChanged, match=r"here: .* changed while the job ran \(w\)"):
        seal.check()


def test_words_that_change_places_are_never_taken_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("valve_tune.base.views.CHUNK", 4)
    tensors = {"w": torch.arange(16.0)}
    seal = Seal(tensors, "here")
    for one, other in ((1, 2), (1, 5), (0, 15)):
        tensors["w"][[one, other]] = tensors["w"][[other, one]]
        with pytest.raises(BaseChanged):
            seal.check()
        tensors["w"][[one, other]] = tensors["w"][[other, one]]
    seal.check()


@pytest.mark.parametrize("name", ["olmo2", "gemma2", "phi3", "granite"])
def test_a_model_of_another_family_holds_the_tensors_it_is_given_and_no_copy(name: str, tmp_path: Path) -> None:
    test_autograd.loaded(name).save_pretrained(tmp_path)
    tensors = read_folder(tmp_path, torch.float32)
    right = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    made = around(right.config, tensors).eval()
    ids = torch.arange(8)[None]
    assert torch.equal(made(ids).logits, right(ids).logits)
    places = {each.data_ptr() for each in tensors.values()}
    assert {each.data_ptr() for each in made.parameters()} == places


def test_a_job_of_another_family_over_shared_weights_makes_the_adapter_of_an_own_copy(tmp_path: Path) -> None:
    test_autograd.loaded("olmo2").save_pretrained(tmp_path / "base")
    publish(read_folder(tmp_path / "base", torch.float32), tmp_path / "weights")
    more = {"span": 0, "lora_dropout": 0.0}
    right = jobs.finished(jobs.job(tmp_path / "base", tmp_path / "own", **more))
    spec = jobs.job(tmp_path / "base", tmp_path / "shared", share_weights=str(tmp_path / "weights"), **more)
    assert jobs.train(spec, jobs.At(20)).end is End.STOPPED
    assert jobs.finished(spec) == right
    (tmp_path / "weights").unlink()  # this process may map it yet, and plays a service in other tests


class Written(OwnCopy):
    """Stands for weights that a trainer could write to."""

    is_writable, looked = True, 0

    def check(self) -> None:
        self.looked += 1


@pytest.mark.parametrize("end", ["well", "by an error"])
def test_a_guard_that_was_killed_never_costs_the_job_and_no_end_is_ever_left_without_a_look(
    tmp_path: Path, end: str
) -> None:
    folder = jobs.model_folder(tmp_path / "base")
    spec = jobs.job(folder, tmp_path / "out", share_weights="chat")
    weights = Written.read(folder, 3, torch.float32)
    guard: Any = stand(spec, weights)
    guard._process.kill()
    guard._process.wait()
    with contextlib.ExitStack() as stack:
        if end == "by an error":
            stack.enter_context(pytest.raises(ZeroDivisionError))
        with guard:
            assert not weights.looked
            if end == "by an error":
                raise ZeroDivisionError
    assert weights.looked == 1


def test_a_job_whose_daemon_takes_its_word_back_never_says_that_it_looked_at_weights_it_did_not(
    tmp_path: Path,
) -> None:
    """Such a job ends with an outcome, not with an error."""
    folder = jobs.model_folder(tmp_path / "base")
    spec = jobs.job(folder, tmp_path / "out", share_weights="chat")

    class Stained(Written):
        def permitted(self) -> None:
            raise NotShared("no longer")

        def check(self) -> None:
            super().check()
            raise BaseChanged("a stray write")

    weights = Stained.read(folder, 3, torch.float32)
    outcome = Trainer(spec, jobs.Counting(spec), make_model=lambda _: open_model(spec, weights=weights)).run()
    assert (weights.looked, outcome.end, outcome.message) == (1, End.FAILED, "a stray write")


def test_weights_that_are_not_those_a_job_began_with_are_refused_at_its_next_start(tmp_path: Path) -> None:
    folder = jobs.model_folder(tmp_path / "base")
    spec = jobs.job(folder, tmp_path / "out", share_weights="chat")
    weights = Written.read(folder, 3, torch.float32)
    with stand(spec, weights):
        pass
    weights.digest = "another"
    with pytest.raises(BaseChanged, match="other weights than when this job began"):
        stand(spec, weights)

"""A service on the CPU that computes with shared weights: `BASE FILE`. Says whether it answers as with its own copy."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from valve_tune.base.shared import adopt

torch.set_num_threads(1)
ids = torch.arange(12)[None]
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
right = model(ids).logits
file = adopt(model, Path(sys.argv[2]))
is_there = all(each.data_ptr() == file.tensors[name].data_ptr() for name, each in model.named_parameters())
print("shared" if is_there and torch.equal(model(ids).logits, right) else "NOT SHARED", flush=True)
sys.stdin.read()

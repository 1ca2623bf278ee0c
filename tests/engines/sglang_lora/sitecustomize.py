"""SGLang pins the memory of its adapters, which needs the driver of a card: without one they lie in ordinary memory."""

import torch


def unpinned(make):
    def made(*given, pin_memory=False, **named):
        return make(*given, **named)

    return made


for name in ("tensor", "empty", "zeros", "ones", "arange", "full"):
    setattr(torch, name, unpinned(getattr(torch, name)))
torch.Tensor.pin_memory = lambda self, *_: self

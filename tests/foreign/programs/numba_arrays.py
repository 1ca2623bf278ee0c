"""numba-cuda: arrays, streams, events, pinned memory; with NVVM installed also a kernel that it compiles itself."""

import json
import sys
import warnings

import numpy as np
from numba import cuda

warnings.simplefilter("ignore")
array = np.arange(1000, dtype=np.float32)
on_card = cuda.to_device(array)
seen = {
    "name": cuda.get_current_device().name,
    "cards": len(cuda.gpus),
    "copied": bool((on_card.copy_to_host() == array).all()),
}

stream = cuda.stream()
with cuda.pinned(array):
    other = cuda.to_device(array, stream=stream)
event = cuda.event()
event.record(stream)
event.synchronize()
stream.synchronize()
seen["event"] = event.query()
free, total = cuda.current_context().get_memory_info()
seen["memory"] = 0 < free <= total

if sys.argv[1:] == ["compile"]:

    @cuda.jit
    def increment(values):
        values[cuda.grid(1)] += 1

    increment[10, 100](on_card)
    cuda.synchronize()
    seen["unchanged"] = bool((on_card.copy_to_host() == array).all())  # it ran as a timed no-op
print(json.dumps(seen))

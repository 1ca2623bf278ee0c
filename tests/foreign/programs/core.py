"""cuda-core: device, stream, pool memory, a kernel from PTX that nobody can run, events, a captured graph."""

import json

from cuda.core import Device, LaunchConfig, ObjectCode, launch

PTX = b"""//
.version 8.0
.target sm_90
.address_size 64
.visible .entry nothing(.param .u64 a) { ret; }
"""

device = Device(0)
device.set_current()
stream = device.create_stream()
kernel = ObjectCode.from_ptx(PTX).get_kernel("nothing")
config = LaunchConfig(grid=1, block=32)
seen = {
    "name": device.name,
    "capability": list(device.compute_capability),
    "sms": device.properties.multiprocessor_count,
}

first, second = device.allocate(4096, stream=stream), device.allocate(4096, stream=stream)
launch(stream, config, kernel, first)
first.copy_to(second, stream=stream)
event = stream.record()
stream.sync()
seen["event"] = event.is_done

builder = device.create_graph_builder().begin_building()
for _ in range(3):
    launch(builder, config, kernel, 0)
graph = builder.end_building().complete()
graph.upload(stream)
graph.launch(stream)
stream.sync()
first.close(stream)
second.close(stream)
stream.sync()
seen["graph"] = True
print(json.dumps(seen))

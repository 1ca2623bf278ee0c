"""Compare proto/abi/nvrm.h with the driver's own headers: `python -m valve_tools.check.driver_abi TREE...`

TREE is a checkout of open-gpu-kernel-modules at some release. Two small C programs print the same keys, one from the
driver's headers and one from ours; every line must agree. Not part of `make check`, because the driver's source is not
ours to ship: run it when a new branch appears (docs/driver-versions.md is the runbook).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from valve_tools.check.tree import ROOT

DRIVER_INCLUDES = (
    "src/common/sdk/nvidia/inc",
    "src/nvidia/arch/nvalloc/unix/include",
    "kernel-open/common/inc",
    "kernel-open/nvidia-uvm",
)
DRIVER_HEADERS = """
#include <stdio.h>
#include <stddef.h>
#include <stdint.h>
#include "nvtypes.h"
#include "nvstatus.h"
#include "nvos.h"
#include "nv_escape.h"
#include "nv-ioctl-numbers.h"
#include "nv-ioctl.h"
#include "class/cl0080.h"
#include "class/cl2080.h"
#include "class/cla06c.h"
#include "class/cl9067.h"
#include "class/cl90f1.h"
#include "class/clc86f.h"
#include "alloc/alloc_channel.h"
#include "ctrl/ctrl0000/ctrl0000gpu.h"
#include "ctrl/ctrl0000/ctrl0000unix.h"
#include "ctrl/ctrl2080/ctrl2080fifo.h"
#include "ctrl/ctrl2080/ctrl2080gpu.h"
#include "ctrl/ctrla06c.h"
#include "ctrl/ctrla06f.h"
#define UvmChannelsHeader
#include "uvm_linux_ioctl.h"
#include "uvm_ioctl.h"
"""
# their struct, our struct, fields as (theirs, ours)
STRUCTS = {
    ("NVOS00_PARAMETERS", "struct nvos00_free"): [("hRoot", "hRoot"), ("status", "status")],
    ("NVOS21_PARAMETERS", "struct nvos21_alloc"): [("hObjectNew", "hObjectNew"), ("pAllocParms", "pAllocParms")],
    ("NVOS64_PARAMETERS", "struct nvos64_alloc"): [("pRightsRequested", "pRightsRequested"), ("status", "status")],
    ("NVOS54_PARAMETERS", "struct nvos54_control"): [("params", "params"), ("status", "status")],
    ("NVOS55_PARAMETERS", "struct nvos55_dup"): [("hClientSrc", "hClientSrc"), ("status", "status")],
    ("nv_ioctl_xfer_t", "struct nv_ioctl_xfer"): [("ptr", "ptr")],
    ("nv_ioctl_rm_api_version_t", "struct nv_ioctl_rm_api_version"): [("versionString", "versionString")],
    ("nv_ioctl_card_info_t", "struct nv_ioctl_card_info"): [("gpu_id", "gpu_id"), ("minor_number", "minor_number")],
    ("NV0080_ALLOC_PARAMETERS", "struct nv0080_alloc"): [("deviceId", "deviceId"), ("vaMode", "vaMode")],
    ("NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS", "struct nv_channel_group_alloc"): [("engineType", "engineType")],
    ("NV_CTXSHARE_ALLOCATION_PARAMETERS", "struct nv_ctxshare_alloc"): [("subctxId", "subctxId")],
    ("NV0000_CTRL_GPU_GET_ID_INFO_V2_PARAMS", "struct nv0000_gpu_id_info"): [("deviceInstance", "deviceInstance")],
    ("NV2080_CTRL_GPU_GET_GID_INFO_PARAMS", "struct nv2080_gpu_gid_info"): [("data", "data")],
    ("NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS", "struct nv2080_fifo_disable_channels"): [
        ("bDisable", "bDisable"),
        ("numChannels", "numChannels"),
        ("bOnlyDisableScheduling", "bOnlyDisableScheduling"),
        ("bRewindGpPut", "bRewindGpPut"),
        ("pRunlistPreemptEvent", "pRunlistPreemptEvent"),
        ("hClientList", "hClientList"),
        ("hChannelList", "hChannelList"),
    ],
    ("NV0000_CTRL_OS_UNIX_EXPORT_OBJECT_TO_FD_PARAMS", "struct nv0000_export_object_to_fd"): [("fd", "fd")],
    ("UVM_REGISTER_CHANNEL_PARAMS", "struct uvm_register_channel"): [
        ("gpuUuid", "gpuUuid"),
        ("rmCtrlFd", "rmCtrlFd"),
        ("hClient", "hClient"),
        ("hChannel", "hChannel"),
        ("rmStatus", "rmStatus"),
    ],
    ("UVM_MAP_EXTERNAL_SPARSE_PARAMS", "struct uvm_map_external_sparse"): [("gpuUuid", "gpuUuid")],
}
SAME_NAMES = """
NV_ESC_RM_FREE NV_ESC_RM_CONTROL NV_ESC_RM_ALLOC NV_ESC_RM_DUP_OBJECT NV_ESC_RM_SHARE NV_ESC_CARD_INFO
NV_ESC_REGISTER_FD NV_ESC_CHECK_VERSION_STR NV_ESC_IOCTL_XFER_CMD NV_ESC_SYS_PARAMS NV_ESC_ATTACH_GPUS_TO_FD
NV01_DEVICE_0 NV20_SUBDEVICE_0 KEPLER_CHANNEL_GROUP_A FERMI_CONTEXT_SHARE_A FERMI_VASPACE_A HOPPER_CHANNEL_GPFIFO_A
NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2 NV0000_CTRL_CMD_GPU_GET_PROBED_IDS NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD
NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD NV2080_CTRL_CMD_GPU_GET_GID_INFO NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS
NVA06C_CTRL_CMD_GPFIFO_SCHEDULE NVA06C_CTRL_CMD_BIND NVA06C_CTRL_CMD_SET_TIMESLICE NVA06C_CTRL_CMD_PREEMPT
NVA06F_CTRL_CMD_GPFIFO_SCHEDULE NVA06F_CTRL_CMD_BIND NVA06F_CTRL_CMD_STOP_CHANNEL NV_OK NV_ERR_GPU_IS_LOST
NV_ERR_INSUFFICIENT_PERMISSIONS NV_ERR_INVALID_ARGUMENT NV_ERR_INVALID_CHANNEL NV_ERR_INVALID_CLIENT
NV_ERR_INVALID_LOCK_STATE NV_ERR_INVALID_OBJECT NV_ERR_INVALID_OBJECT_HANDLE NV_ERR_INVALID_OBJECT_PARENT
NV_ERR_INVALID_PARAM_STRUCT NV_ERR_INVALID_STATE NV_ERR_NOT_SUPPORTED NV_ERR_OBJECT_NOT_FOUND NV_ERR_TIMEOUT
UVM_REGISTER_GPU_VASPACE UVM_UNREGISTER_GPU_VASPACE UVM_REGISTER_CHANNEL UVM_UNREGISTER_CHANNEL
UVM_MAP_EXTERNAL_ALLOCATION UVM_FREE UVM_REGISTER_GPU UVM_UNREGISTER_GPU UVM_UNMAP_EXTERNAL
UVM_CREATE_EXTERNAL_RANGE UVM_MAP_EXTERNAL_SPARSE UVM_MM_INITIALIZE UVM_INITIALIZE
"""
CHANNEL = "NV_CHANNEL_ALLOC_PARAMS"


def program(headers: str, side: int) -> str:
    lines = []
    for names, fields in STRUCTS.items():
        key, struct = names[1].removeprefix("struct "), names[side]
        lines.append(f'printf("sizeof {key} %zu\\n", sizeof({struct}));')
        for field in fields:
            lines.append(f'printf("offset {key}.{field[1]} %zu\\n", offsetof({struct}, {field[side]}));')
    lines += [f'printf("value {name} %#lx\\n", (unsigned long)({name}));' for name in SAME_NAMES.split()]
    return headers + "int main(void)\n{\n" + "\n".join(lines) + "\nreturn 0;\n}\n"


def branch_program(headers: str) -> str:
    """What differs between branches: sizes and places that NV_BRANCH_TABLE holds."""
    return headers + (
        "int main(void)\n{\n"
        f'printf("%zu %zu %zu %zu %zu\\n", sizeof({CHANNEL}), offsetof({CHANNEL}, engineType), '
        f"offsetof({CHANNEL}, cid), sizeof(NVA06C_CTRL_GPFIFO_SCHEDULE_PARAMS), "
        "offsetof(UVM_UNREGISTER_CHANNEL_PARAMS, hClient));\nreturn 0;\n}\n"
    )


def run(source: str, includes: list[Path]) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        unit, binary = Path(scratch, "abi.c"), Path(scratch, "abi")
        unit.write_text(source)
        flags = [f"-I{path}" for path in includes]
        build = subprocess.run(
            ["gcc", "-w", "-DNV_UNIX", "-DNV_LINUX", *flags, str(unit), "-o", str(binary)],
            check=False,
            capture_output=True,
            text=True,
        )
        if build.returncode:
            raise SystemExit(f"driver_abi: does not compile:\n{build.stderr[:2000]}")
        return subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout.splitlines()


def compare(tree: Path) -> list[str]:
    """Lines that disagree for this release; empty when all is as we say."""
    includes = [tree / folder for folder in DRIVER_INCLUDES]
    ours = run(program('#include <stdio.h>\n#include "nvrm.h"\n', 1), [ROOT / "proto/abi"])
    theirs = run(program(DRIVER_HEADERS, 0), includes)
    return [f"ours: {left}   driver: {right}" for left, right in zip(ours, theirs, strict=True) if left != right]


def main() -> int:
    failed = False
    for name in sys.argv[1:]:
        tree = Path(name)
        differences = compare(tree)
        facts = run(branch_program(DRIVER_HEADERS), [tree / folder for folder in DRIVER_INCLUDES])[0]
        print(f"{tree.name}: channel params, engineType at, cid at, schedule params, unregister at = {facts}")
        print("\n".join(f"  DIFFERS {line}" for line in differences) or "  all sizes, offsets and numbers agree")
        failed |= bool(differences)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())

"""How the shim gets into a container. One policy for every route: the webhook sees a pod before it exists, NRI a
container before it is created, the device plugin an allocation. Pure.

Online containers are changed only by what every program survives: read-only mounts and one more entry in LD_PRELOAD,
which ld.so ignores when the file is missing. On any doubt the container stays exactly as it is, and the reason is the
mark that operators read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

# CDI kinds of GPUs: of the device plugin, and of claims by NVIDIA's DRA driver.
_GPU_KINDS: Final = ("nvidia.com/gpu=", "k8s.gpu.nvidia.com/")
SANITIZERS: Final = ("libasan.", "liblsan.", "libtsan.", "libhwasan.", "libclang_rt.")


class Skipped(Exception):
    """A container, or a whole pod, that is better left alone; the text becomes its injection mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionSettings:
    """The chart's values. Folders are mounted, never files: a file mounted alone goes stale when it is replaced."""

    shim_folder: str = "/var/lib/valve/shim"
    run_folder: str = "/run/valve"  # as containers see it
    # What is mounted there: the link socket alone. The run folder itself also holds the API, whose file mode does not
    # stop a container's root.
    client_folder: str = "/run/valve/client"
    sandboxed_runtimes: tuple[str, ...] = ("gvisor", "runsc", "kata", "kata-qemu", "kata-clh")

    @property
    def preload(self) -> str:
        return f"{self.shim_folder}/current/libvalve.so"

    @property
    def mounts(self) -> tuple[tuple[str, str], ...]:
        """(source on the node, path in the container), all of them read-only."""
        return (self.shim_folder, self.shim_folder), (self.client_folder, self.run_folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTraits:
    """What decides for the pod as a whole. `wish` is the user's annotation: "false", "true" or empty."""

    wish: str = ""
    has_gpu: bool = True
    host_pid: bool = False
    runtime: str = ""
    os: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerTraits:
    """`hidden` says why the container may hold an LD_PRELOAD that this route cannot see; empty when it cannot."""

    preload: str = ""
    hidden: str = ""
    mounts: Mapping[str, str] = field(default_factory=dict)  # path in the container -> source


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """What to add to one container. Nothing at all when it has everything already."""

    preload: str | None  # the new value of LD_PRELOAD; None: leave it
    mounts: tuple[tuple[str, str], ...]


def check_pod(pod: PodTraits, settings: InjectionSettings) -> None:
    """Every reason to leave a pod alone, the plainest first."""
    if pod.wish == "false":
        raise Skipped("opt-out")
    if not pod.has_gpu:
        raise Skipped("no-gpu")
    if pod.host_pid:
        raise Skipped("host-pid")
    if pod.runtime in settings.sandboxed_runtimes:
        raise Skipped("sandboxed-runtime")
    if pod.os == "windows":
        raise Skipped("windows")


def inject(container: ContainerTraits, settings: InjectionSettings) -> Injection:
    """What one container needs. Applied twice it adds nothing."""
    if container.hidden:
        raise Skipped(container.hidden)
    present = {path.rstrip("/") or "/": source.rstrip("/") for path, source in container.mounts.items()}
    for source, path in settings.mounts:
        if present.get(path, source) != source:
            raise Skipped("mount-path-taken")
    return Injection(
        preload=merge_preload(container.preload, settings.preload),
        mounts=tuple((source, path) for source, path in settings.mounts if path not in present),
    )


def merge_preload(present: str, ours: str) -> str | None:
    """Ours in front of what is there (an allocator, as a rule); None if it is there already. Blanks separate too.

    Only a sanitizer's runtime stays before it: with anything in front it ends the program.
    """
    entries = [entry for entry in present.replace(" ", ":").split(":") if entry]
    if ours in entries:
        return None
    front = [entry for entry in entries if _is_sanitizer(entry)]
    return ":".join([*front, ours, *(entry for entry in entries if not _is_sanitizer(entry))])


def _is_sanitizer(entry: str) -> bool:
    return entry.rpartition("/")[2].startswith(SANITIZERS)


def holds_gpu(env: Sequence[str], cdi_devices: Sequence[str]) -> bool:
    """Whether a container was given a GPU, judged by what a device plugin left on it.

    `all` does not count: CUDA images carry it, and most of their containers were given nothing.
    """
    visible = next((entry.partition("=")[2] for entry in env if entry.startswith("NVIDIA_VISIBLE_DEVICES=")), "")
    named = visible not in ("", "all", "void", "none")

    return named or any(name.startswith(_GPU_KINDS) for name in cdi_devices)

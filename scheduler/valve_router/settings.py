"""The settings of the router: where it listens, what its replicas are, and its limits."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from valve_router.plan.active import ActiveSettings
from valve_router.plan.profile import Law, Profile
from valve_router.plan.score import ScoreSettings

_LABEL = "[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_SERVICE = re.compile(rf"({_LABEL})/({_LABEL})(?::([a-z0-9-]{{1,63}}))?")
PASSED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
    "/v1/responses",
    "/generate",
    "/tokenize",
    "/detokenize",
)
"""What clients may ask of an engine. Its other paths are for its operator: some end the requests of all clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A Kubernetes Service whose pods are the replicas."""

    namespace: str
    name: str
    port: str = ""  # its name, or its number in the pods; may be left out where there is one


def service_of(text: str) -> Service:
    found = _SERVICE.fullmatch(text)
    if found is None:
        raise ValueError(f"--service {text}: not NAMESPACE/NAME or NAMESPACE/NAME:PORT")
    return Service(namespace=found[1], name=found[2], port=found[3] or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    replicas: tuple[str, ...] = ()  # base URLs
    service: Service | None = None  # in their place
    host: str = "127.0.0.1"
    port: int = 8100
    token: str = ""  # clients must send it; required where others than this machine can connect
    operator_token: str = ""  # for /route and /metrics; without it and with a token no client drains a replica by HTTP
    replica_token: str = ""  # the router sends it to the replicas
    paths: tuple[str, ...] = PASSED
    newest: tuple[str, ...] = ()  # names that stand for the newest of their versions
    open_per_replica: int = 256  # requests under way in one replica; more wait nowhere: they are refused
    kv_tokens: int = 0  # that the KV memory of one replica holds; 0: not known
    tpot_target_s: float = 0.0  # a replica whose tokens come slower than this gets no more while others can; 0: none
    training_folder: str = ""  # fleet jobs are kept there; empty: none are taken
    training_silent_s: float = 60.0  # a trainer that asked nothing for so long is given up, and its work queued again
    training_age_s: float = 60.0  # a micro-batch that was queued for so long is deferred no more
    training_bytes: int = 1 << 30  # of one pushed checkpoint
    body_bytes: int = 32 << 20
    held_bytes: int = 256 << 20  # of all bodies at one time
    connect_s: float = 2.0
    silent_s: float = 600.0  # the longest pause of a replica within one answer
    stuck_s: float = 60.0  # a client that takes nothing of its answer for so long is cut off
    health_s: float = 1.0
    score: ScoreSettings = field(default_factory=ScoreSettings)
    active: ActiveSettings = field(default_factory=ActiveSettings)
    first_guess: Profile = field(
        default_factory=lambda: Profile(stages=1, forward=Law(fixed_s=0.03, per_token_s=1 / 20_000), backward=Law())
    )

    def __post_init__(self) -> None:
        if bool(self.replicas) == bool(self.service):
            raise ValueError("--replica: name at least one, such as http://10.0.0.5:8000; or a --service, not both")
        for url in self.replicas:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
                raise ValueError(f"--replica {url}: not a URL such as http://10.0.0.5:8000")
        if len(set(self.replicas)) != len(self.replicas):
            raise ValueError("--replica: one URL is there twice")
        if not self.token and not is_loopback(self.host):
            raise ValueError(
                f"--listen {self.host}: others can connect there; set --token-file, or listen on 127.0.0.1"
            )
        if not 1 <= self.port <= 65535:
            raise ValueError(f"--listen: port {self.port} is not from 1 to 65535")
        if not all(path.startswith("/") for path in self.paths):
            raise ValueError("--path: must begin with /")
        if self.open_per_replica < 1:
            raise ValueError("--open-per-replica: must be at least 1")
        if self.kv_tokens < 0 or self.training_age_s < 0:
            raise ValueError("--kv-tokens and --training-age-s: must be 0 or more")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

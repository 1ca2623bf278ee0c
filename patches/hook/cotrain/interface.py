"""What every planner is told before a step, and what it answers.

The trainer's work is counted in *units*: one layer, forward or backward, over one token. A micro-batch of `tokens`
tokens is `layers * tokens` units forward and as many backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum


class Direction(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Lane(Enum):
    """Where the trainer's kernels are while the engine makes a step."""

    ALONE = "alone"
    """Nowhere."""
    PARTITION = "partition"
    """On other processors of the card, as many layers as fit."""
    FUSED = "fused"
    """Rows of the engine's own batch: `tokens` tokens through `layers` layers."""
    STREAM = "stream"
    """Beside the step without a bound: `layers` layers over `tokens` tokens; the step waits for both."""
    PAUSE = "pause"
    """Nowhere; the whole card is the trainer's for `pause_ms` before the step."""


class WhenIdle(Enum):
    """What the trainer does while no request is there, and so what the next request waits for."""

    NOTHING = "nothing"
    LAYER = "layer"
    """The layer that runs."""
    STEP = "step"
    """The whole optimizer step that runs."""
    STOPPED = "stopped"
    """A stop from outside, in the middle of a kernel."""


@dataclass(frozen=True, slots=True)
class Plan:
    lane: Lane
    layers: int = 0
    tokens: int = 0
    own: float = 1.0
    """The engine's share of the processors."""
    other: float = 0.0
    """The trainer's."""
    pause_ms: float = 0.0
    """Before the step; a request that comes ends it. Any lane may have one."""


ALONE = Plan(Lane.ALONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What the owner of the service consented to."""

    step_ms: float
    """The longest step that a planner without credits aims at: the target for a token."""
    ttft_ms: float = float("inf")
    gap_ms: float = 100.0
    """The longest time between two tokens of a reader, for planners that use credits."""


@dataclass(slots=True)
class State:
    """The engine and the job before a step; one object, written in place."""

    now_ms: float = 0.0
    running: int = 0
    context: int = 0
    prompt_tokens: int = 0
    """Of prompts, in this step."""
    prompt_pairs: float = 0.0
    """Their attention pairs."""
    waiting: int = 0
    direction: Direction = Direction.FORWARD
    left: float = 0.0
    """Units left of this phase."""
    tokens: int = 0
    """Of a micro-batch."""
    resident: float = 1.0
    """The share of the frozen layers that is on the card."""
    cache_layers: float = 0.0
    """What the KV cache in use would hold of the frozen layers, as a share of them."""
    is_ready: bool = True
    """False: the job is parked (no memory, no data)."""


class Hearer:
    """The events of an engine. Whoever does not need one ignores it."""

    def arrived(self, request: int, now_ms: float) -> None:
        """A request came."""

    def first_token(self, request: int, now_ms: float) -> None:
        """It got its first token."""

    def delivered(self, now_ms: float) -> None:
        """Every decoding request got a token."""

    def finished(self, request: int, now_ms: float) -> None:
        """It got its last token."""

    def stepped(self, state: State, plan: Plan, ms: float) -> None:
        """The step took `ms`; the state is that from before it."""


class Planner(Hearer, ABC):
    """One way of sharing. The engine tells it every event, and asks before each step."""

    name = ""
    needs_engine = False
    """It patches the engine and runs in its process."""
    same_base = False
    """It trains on the weights that are served, and on no others."""
    copies = 2
    """Of the base in memory."""
    gpus = 1
    """That it takes: 2 where the trainer has one of its own."""
    idle = WhenIdle.LAYER
    share = 1.0
    """Of the card, for the trainer while nobody is served."""

    @abstractmethod
    def plan(self, state: State) -> Plan: ...

"""What the owner of an online service offers: its latency target (`slo`), whether pauses between its steps may
be given to offline work (`grant`), and whether a trainer may map its weights (`share_weights`). All are words that a
person wrote; nothing is granted without the first two.

Words come from several places, the nearest to the service first: its own, its namespace's, the node's configuration.
The first place that says anything about a target, or about granting, is believed. One that cannot be understood grants
nothing: a slip must not end in a wider place's looser target.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

GAP_MS = 100.0
"""The longest pause between two tokens that a reader may see, where nobody says another."""
LONGEST_MS = 3_600_000.0
UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
TIMES = ("ttft", "tpot", "gap")
EXAMPLE = "for example ttft=500ms,tpot=40ms,gap=100ms"
YES, NO = "true", "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """In ms. 0: not stated."""

    tpot_ms: float = 0.0
    ttft_ms: float = 0.0
    gap_ms: float = GAP_MS

    def __str__(self) -> str:
        stated = (("ttft", self.ttft_ms), ("tpot", self.tpot_ms), ("gap", self.gap_ms))
        return ",".join(f"{name}={ms:g}ms" for name, ms in stated if ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one place says, as written. Empty: nothing."""

    slo: str = ""
    grant: str = ""
    share_weights: str = ""


SILENT = Said()


@dataclass(frozen=True, slots=True, kw_only=True)
class Consent:
    """What all places come to."""

    slo: Slo | None = None
    grant: bool = False
    weights: str = ""  # as written
    problem: str = ""  # why what was said of a target and of pauses counts for nothing

    @property
    def share_weights(self) -> bool:
        """What cannot be read is no consent."""
        return self.weights == YES

    def words(self) -> str:
        """For people; empty where nothing was said."""
        return "; ".join(filter(None, [self._of_pauses(), self._of_weights()]))

    def _of_pauses(self) -> str:
        if self.problem:
            return f"no granted time: {self.problem}"
        if self.grant:
            return f"consents to pauses within {self.slo}"
        return f"states {self.slo}, consents to no pauses" if self.slo is not None else ""

    def _of_weights(self) -> str:
        said = {"": "", YES: "shares its weights with trainers", NO: "shares no weights"}
        return said.get(self.weights, f"shares no weights: {self.weights!r} is neither {YES} nor {NO}")


NOTHING = Consent()


def read_slo(text: str) -> Slo:
    """ValueError says what is wrong, and what would be right."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name not in TIMES:
            raise ValueError(f"slo: {part.strip()!r} is none of {', '.join(TIMES)} with a time, {EXAMPLE}")
        if name in found:
            raise ValueError(f"slo: {name} is given twice")
        found[name] = _read_time(name, value)
    if not found.keys() - {"gap"}:
        raise ValueError(f"slo: a gap alone is not a target, {EXAMPLE}")
    return Slo(tpot_ms=found.get("tpot", 0.0), ttft_ms=found.get("ttft", 0.0), gap_ms=found.get("gap", GAP_MS))


def _read_time(name: str, value: str) -> float:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(us|ms|s)?", value)
    if not match:
        raise ValueError(f"slo: {name}={value!r} is not a time, {EXAMPLE}")
    if match[2] is None:
        raise ValueError(f"slo: {name}={value} has no unit (us, ms or s), {EXAMPLE}")
    ms = float(match[1]) * UNITS[match[2]]
    if not 0 < ms <= LONGEST_MS:
        raise ValueError(f"slo: {name}={value} must be above 0 and at most an hour")
    return ms


def read_answer(name: str, text: str) -> bool:
    if text not in (YES, NO):
        raise ValueError(f"{name}: {text!r} is neither {YES} nor {NO}")
    return text == YES


def check(said: Said) -> None:
    """ValueError where this place's own words make no sense. A grant may rest on a wider place's target."""
    if said.slo:
        read_slo(said.slo)
    if said.grant:
        read_answer("grant", said.grant)
    if said.share_weights:
        read_answer("share_weights", said.share_weights)


def consent_of(places: Iterable[Said]) -> Consent:
    """The nearest place first."""
    slo, grant, share_weights = "", "", ""
    for said in places:
        slo, grant = slo or said.slo, grant or said.grant
        share_weights = share_weights or said.share_weights
    return _consent(slo, grant, share_weights)


@lru_cache(maxsize=64)  # a node has few different ones, and asks for each service's all the time
def _consent(slo_text: str, grant_text: str, weights: str) -> Consent:
    return replace(_of_pauses(slo_text, grant_text), weights=weights)


def _of_pauses(slo_text: str, grant_text: str) -> Consent:
    try:
        slo = read_slo(slo_text) if slo_text else None
        grant = read_answer("grant", grant_text) if grant_text else False
    except ValueError as error:
        return Consent(problem=str(error))
    if grant and (slo is None or not slo.tpot_ms):
        return Consent(slo=slo, problem="grant: state a target for the time between tokens, too (slo tpot=...)")
    return Consent(slo=slo, grant=grant)

"""Dropout whose mask is a function of where it is: any tile, in any order, on any grid, draws the same one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Names one micro-batch of one job."""

    seed: int
    step: int
    sequence: int
    share: float = 0.0

    def key(self, site: str) -> int:
        name = f"{self.seed}/{self.step}/{self.sequence}/{site}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little")

    def mask(self, site: str, shape: torch.Size, first: int, length: int, like: torch.Tensor) -> torch.Tensor:
        """For rows [first, first + shape[1]) of [rows, length, width]: 0, or what keeps the expectation."""
        rows, tokens, width = shape
        device = like.device
        row = torch.arange(rows, device=device).view(-1, 1) * length
        where = row + torch.arange(first, first + tokens, device=device)
        column = torch.arange(width, device=device)
        mixed = _scatter(_scatter(where ^ self.key(site)).unsqueeze(-1) + _scatter(column))
        kept = mixed >= int(self.share * (_WORD + 1))
        return kept.to(like.dtype) / (1 - self.share)


def _scatter(words: torch.Tensor) -> torch.Tensor:
    """A 32-bit finalizer (the constants are those of MurmurHash3's, public domain), in 64-bit integers."""
    words = words & _WORD
    words = ((words ^ (words >> 16)) * 0x85EBCA6B) & _WORD
    words = ((words ^ (words >> 13)) * 0xC2B2AE35) & _WORD
    return words ^ (words >> 16)

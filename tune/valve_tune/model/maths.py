"""The formulas of a block that are not linear: norm, rotation, attention, and their vector-Jacobian products."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Norms, rotations and losses are computed in fp32, or in fp64 where everything is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x32 = wide(x)
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def norm_backward(x: torch.Tensor, weight: torch.Tensor, eps: float, dy: torch.Tensor) -> torch.Tensor:
    x32 = wide(x)
    rate = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    inner = wide(dy) * wide(weight)
    pull = (inner * x32).mean(-1, keepdim=True) * rate.pow(3)
    return (inner * rate - x32 * pull).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x is [rows, tokens, heads, size]; cos and sin are [rows, tokens, size]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos.unsqueeze(2) + turned * sin.unsqueeze(2)


def rotate_backward(dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = dy.shape[-1] // 2
    scaled = dy * sin.unsqueeze(2)
    return dy * cos.unsqueeze(2) + torch.cat((scaled[..., half:], -scaled[..., :half]), -1)


def silu_backward(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(x)
    return dy * (gate * (1 + x * (1 - gate)))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """q is [rows, tokens, heads, size], k and v have the keys so far. No mask means causal from the first token."""
    groups = q.shape[2] // k.shape[2]
    parts = [q.transpose(1, 2), _spread(k, groups), _spread(v, groups)]
    mixed = F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=mask is None)
    return mixed.transpose(1, 2).reshape(*q.shape[:2], -1)


def attend_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(attention output, dq, dk, dv). The kernel's own backward: it wants its forward once more, and no square matrix
    is kept from one pass to the other.
    """
    with torch.enable_grad():
        q, k, v = (each.detach().requires_grad_() for each in (q, k, v))
        mixed = attend(q, k, v, mask)
        dq, dk, dv = torch.autograd.grad(mixed, (q, k, v), dy)
    return mixed.detach(), dq, dk, dv


def _spread(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Each key and value head for all query heads of its group."""
    x = x.transpose(1, 2)
    if groups == 1:
        return x
    rows, heads, tokens, size = x.shape
    return x[:, :, None].expand(rows, heads, groups, tokens, size).reshape(rows, heads * groups, tokens, size)

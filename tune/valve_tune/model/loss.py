"""The head: loss of assistant tokens and its gradient, in pieces, so that no row's logits are ever kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from valve_tune.model.maths import norm, norm_backward, wide
from valve_tune.train.batch import IGNORED

PIECE = 256  # rows whose logits exist at one time


def targets_of(labels: torch.Tensor) -> torch.Tensor:
    """What each token is to predict: the label after it, and nothing at the end of a row."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def head_loss(
    x: torch.Tensor, targets: torch.Tensor, norm_weight: torch.Tensor, head: torch.Tensor, eps: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the losses times scale, gradient of x). Rows without a label get zeros and cost nothing."""
    flat, wanted = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    dx = torch.zeros_like(flat)
    rows = (wanted != IGNORED).nonzero().view(-1)
    loss = wide(flat.new_zeros(()))
    for piece in rows.split(PIECE):
        hidden, label = flat[piece], wanted[piece].unsqueeze(1)
        logits = wide(norm(hidden, norm_weight, eps) @ head.t())
        chances = torch.log_softmax(logits, -1)
        loss = loss - chances.gather(1, label).sum()
        chances.exp_()
        chances.scatter_add_(1, label, chances.new_full(label.shape, -1.0))
        dnormed = (chances * scale).to(head.dtype) @ head
        dx[piece] = norm_backward(hidden, norm_weight, eps, dnormed)
    return loss * scale, dx.view_as(x)

"""The log-ratio of a whole trajectory, for the losses that treat a trajectory as one action."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.losses.types import Behaviour, PolicyLossInput, log_ratio


def mean_log_ratio(inputs: PolicyLossInput, behaviour: Behaviour) -> tuple[Tensor, Tensor]:
    """(mean of Delta over the action tokens of a token's trajectory [N] fp32, nats, detached; valid [N] bool).

    exp(mean) is the geometric mean of the token ratios. Valid are the action tokens of trajectories whose every action token
    has a finite Delta: one broken record leaves its trajectory without a mean. The mean is finite everywhere, 0 without action
    tokens. Sums are fp64, so that the order in which a GPU adds does not matter against bands of 1e-4.
    """
    if inputs.cu_seqlens is None:
        raise ValueError("a sequence-level loss needs cu_seqlens")
    delta, finite = log_ratio(inputs, behaviour)
    ends = inputs.cu_seqlens[1:]
    row = torch.searchsorted(ends, torch.arange(len(delta), device=ends.device), right=True)
    columns = torch.stack([delta.detach().double(), inputs.mask.double(), (inputs.mask & ~finite).double()], dim=1)
    total, actions, broken = columns.new_zeros(len(ends), 3).index_add(0, row, columns)[row].unbind(1)
    return (total / actions.clamp(min=1)).float(), inputs.mask & (broken == 0)

"""Sequence-level rejection: a trajectory trains whole or not at all, by the geometric mean of its token ratios.

    maximise  E_i,t[ 1[low <= s_i <= high] * A_it * log pi_theta(y_it) ]
    s_i     = exp(1/|y_i| sum_t log(pi_theta(y_it) / pi_rollout(y_it)))         over action tokens

A practice of several trainers, no paper's own equation; s_i is the ratio of GSPO (arXiv 2507.18071, Eq. 7). Choices of ours:
pure rejection, so that a kept token has weight 1; the closed band [0.999, 1.002]; a trajectory with a non-finite log-ratio is
rejected; the norm `token_global`, which the catalog declares and the caller applies.
"""

from __future__ import annotations

import math

import torch

from trainer.losses.dis import weighted_logprobs
from trainer.losses.sequence import mean_log_ratio
from trainer.losses.types import PolicyLossInput, PolicyLossOutput


def sequence_rejection_loss(inputs: PolicyLossInput, *, low: float = 0.999, high: float = 1.002) -> PolicyLossOutput:
    """token_loss = -A * log pi_theta on kept trajectories, else 0. low, high: units of the sequence ratio."""
    mean, valid = mean_log_ratio(inputs, "rollout")
    lower, upper = mean.new_tensor([math.log(low), math.log(high)])
    return weighted_logprobs(inputs, valid & (mean >= lower) & (mean <= upper), torch.zeros_like(mean))

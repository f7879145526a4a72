"""GSPO in its token form (arXiv 2507.18071, Eq. 13-14; the ratio is Eq. 7): one clipped ratio per trajectory.

    maximise  1/G sum_i 1/|y_i| sum_t  min(s_it * A_it, clip(s_it, 1 - eps_low, 1 + eps_high) * A_it)
    s_it    = sg(s_i) * pi_theta(y_it) / sg(pi_theta(y_it))
    s_i     = exp(1/|y_i| sum_t log(pi_theta(y_it) / pi_old(y_it)))

In value s_it is s_i; its gradient is s_i * grad log pi_theta(y_it), so the token form allows an advantage per token and equals
GSPO when it is the same for all. Norm: `seq_mean`, which the catalog declares and the caller applies.

Choices of ours: |y_i| and the mean count action tokens only. pi_old is the engine's policy by default, as under the trainer's
own s_i == 1 in the one step of a batch. A trajectory with a non-finite log-ratio is rejected whole; bounds, the value of
clipped tokens and the limit on |log s_i| are those of `ppo_clip`.
"""

from __future__ import annotations

from trainer.losses.ppo_clip import surrogate
from trainer.losses.sequence import mean_log_ratio
from trainer.losses.types import Behaviour, PolicyLossInput, PolicyLossOutput


def gspo_loss(
    inputs: PolicyLossInput, *, eps_low: float = 3e-4, eps_high: float = 4e-4, old: Behaviour = "rollout"
) -> PolicyLossOutput:
    """token_loss = -s * A where not clipped, else 0. eps_low, eps_high: units of the sequence ratio, below and above 1."""
    mean, valid = mean_log_ratio(inputs, old)
    logprobs = inputs.logprobs.float()
    delta = mean + (logprobs - logprobs.detach())
    return surrogate(delta, valid, inputs.advantages, eps_low=eps_low, eps_high=eps_high)

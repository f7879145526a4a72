"""Token-level GAE that skips observation tokens (SAO, arXiv 2607.07508, Eq. 4-5), on packed trajectories.

With the action tokens of one trajectory enumerated j = 0..l-1 and every observation token deleted:

    delta_j = u_j + gamma * v_{j+1} - v_j            v_l = bootstrap (0: the trajectory ended)
    A_j     = delta_j + gamma * lambda * A_{j+1}     A_l = 0

An observation therefore costs one factor gamma * lambda, however long it is, and its values are never read.

All trajectories are solved at once: their action tokens form one sequence of affine maps `A_j = delta_j + w_j * A_{j+1}`
with w = 0 on each trajectory's last action. Composing neighbours halves the sequence (cyclic reduction), so the work is
O(action tokens) in O(log) vectorised steps, whatever the spread of lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.advantages.types import AdvantageInput, CriticEstimator, Estimate


def skip_observation_gae(
    values: Tensor,
    rewards: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """Advantages A, [N] fp32, computed in fp64; zero on observation tokens.

    values: [N] float, V(state before the token), reward units; anything at all on observation tokens.
    rewards: [N] float, zero on observation tokens.
    mask: [N] bool, True on action tokens.
    cu_seqlens: [B+1] int64, trajectory b is tokens cu_seqlens[b]:cu_seqlens[b+1].
    gamma: discount per action token. lam: lambda, one or [B]. bootstrap: [B], the value after the last action (default 0).

    Raises `ValueError` if an observation token carries a reward: the recursion would lose it.
    """
    actions, advantages, _ = _skip(values, rewards, mask, cu_seqlens, gamma, lam, bootstrap)
    return scatter(actions, advantages, mask)


def value_targets(
    values: Tensor,
    rewards: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """Lambda-returns G = A(lam) + V for the critic, [N] fp32; zero on observation tokens. Arguments as `skip_observation_gae`.

    With lam = 1 they are the discounted sums of the rewards to come (plus bootstrap) and do not depend on `values`, which may
    then be zeros: for a terminal reward R and gamma = 1 every action token gets R.
    """
    actions, advantages, action_values = _skip(values, rewards, mask, cu_seqlens, gamma, lam, bootstrap)
    return scatter(actions, advantages + action_values, mask)


def length_adaptive_lambda(n_actions: Tensor, alpha: float) -> Tensor:
    """lambda = max(0, 1 - 1/(alpha * l)) per trajectory, [B] fp64, from its number of action tokens l, [B] int.

    The end-to-end weight lambda^(l-1) then tends to exp(-1/alpha) for every length. Never cast it to bf16, which rounds it
    to 1.
    """
    return 1.0 - 1.0 / (alpha * n_actions.double()).clamp(min=1.0)


def _skip(
    values: Tensor,
    rewards: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of the n action tokens (int64), and A and V there (fp64); each [n]."""
    actions = mask.nonzero().squeeze(1)
    v, u = values.detach()[actions].double(), action_rewards(rewards, actions)
    return actions, solve(v, u, actions, cu_seqlens, gamma, lam, bootstrap), v


def _estimate(inputs: AdvantageInput, lam: float | Tensor) -> Estimate:
    i = inputs
    actions, advantages, v = _skip(i.values, i.rewards, i.mask, i.cu_seqlens, i.gamma, lam, i.bootstrap)
    return Estimate(scatter(actions, advantages, i.mask), scatter(actions, advantages + v, i.mask))


def _length(inputs: AdvantageInput) -> Tensor:
    return per_trajectory(inputs.mask.nonzero().squeeze(1), inputs.cu_seqlens)


SKIP_OBSERVATION = CriticEstimator(_estimate, _length, supervised=lambda inputs: inputs.mask)


def action_rewards(rewards: Tensor, actions: Tensor) -> Tensor:
    """The rewards at the n positions of action tokens, [n]. Raises `ValueError` if any other token carries one."""
    u = rewards[actions]
    if torch.count_nonzero(u) != torch.count_nonzero(rewards):
        raise ValueError("a reward sits on an observation token; put it on the last action token of its turn")
    return u


def per_trajectory(positions: Tensor, cu_seqlens: Tensor) -> Tensor:
    """How many of the ascending `positions` [n] lie in each trajectory, [B] int64."""
    return torch.searchsorted(positions, cu_seqlens).diff()


def solve(
    v: Tensor,
    u: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None,
) -> Tensor:
    """A [n] fp64 of n steps with values v [n] fp64 and rewards u [n]; the ascending `positions` [n] tell whose step it is."""
    edges = torch.searchsorted(positions, cu_seqlens)
    counts = edges.diff()
    acted = counts > 0
    last = edges[1:][acted] - 1
    rows = len(counts)
    weight = torch.repeat_interleave(_per_row(lam, rows, v) * gamma, counts, output_size=len(v))
    weight[last] = 0.0
    next_v = torch.empty_like(v)
    next_v[:-1] = v[1:]
    next_v[last] = _per_row(0.0 if bootstrap is None else bootstrap, rows, v)[acted]
    delta = next_v.mul_(gamma).sub_(v).add_(u)
    return _affine_suffix_scan(delta, weight)


def scatter(positions: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    """x [n] at `positions` [n], zero elsewhere, shaped as `mask`, fp32."""
    out = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    out[positions] = x.float()
    return out


def _per_row(x: float | Tensor, rows: int, like: Tensor) -> Tensor:
    return torch.as_tensor(x, dtype=like.dtype, device=like.device).expand(rows)


def _affine_suffix_scan(x: Tensor, w: Tensor) -> Tensor:
    """a with a[j] = x[j] + w[j] * a[j+1] and a[n] = 0; all [n] fp64."""
    n = len(x)
    if n < 2:
        return x
    if n % 2:
        x, w = torch.nn.functional.pad(x, (0, 1)), torch.nn.functional.pad(w, (0, 1))
    (x_even, x_odd), (w_even, w_odd) = x.view(-1, 2).unbind(1), w.view(-1, 2).unbind(1)
    even = _affine_suffix_scan(torch.addcmul(x_even, w_even, x_odd), w_even * w_odd)
    a = torch.empty_like(x)
    a[0::2] = even
    a[1::2] = x_odd
    a[1:-1:2].addcmul_(w_odd[:-1], even[1:])
    return a[:n]

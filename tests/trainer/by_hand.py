"""The contract without the trainer: gradients from plain transformers, one sequence at a time; advantages and token weights
from `tests.reference`; denominators counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from harness.registry import find
from harness.trajectory import Trajectory
from tests.reference import gae, losses, outcomes
from trainer.model import Critic

ALPHA = 1.5
Advantages = list[np.ndarray]
"""Of each trajectory, on its action tokens."""


def values_before(critic: Critic, t: Trajectory) -> np.ndarray:
    """V of the state before each token, [L]; the first has none, and nothing may read it."""
    with torch.no_grad():
        after = critic(torch.from_numpy(t.tokens), torch.arange(len(t)), [0, len(t)])
    return np.concatenate([[np.nan], after.double().numpy()[:-1]])


def value_after(critic: Critic, t: Trajectory) -> float:
    """V of the state after the last token."""
    with torch.no_grad():
        return float(critic(torch.from_numpy(t.tokens), torch.arange(len(t)), [0, len(t)])[-1])


def last_of_turns(t: Trajectory) -> np.ndarray:
    """True on the last token of each action turn, [L]."""
    return t.loss_mask & (np.append(t.turn_ids[1:], -1) != t.turn_ids)


def estimate(
    name: str, critic: Critic, t: Trajectory, lam: float | None = None, gamma: float = 1.0, bootstrap: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """(A, G) of a critic estimator on the action tokens; without `lam` the length-adaptive one."""
    values, rewards, mask = values_before(critic, t), t.token_rewards(), t.loss_mask
    where = np.flatnonzero(mask)
    steps = {"skip_observation": len(where), "through_observation": where[-1] - where[0] + 1}.get(name, t.n_turns)
    lam = gae.length_adaptive_lambda(int(steps), ALPHA) if lam is None else lam
    if name == "skip_observation":
        pair = gae.skip_observation(values, rewards, mask, gamma, lam, bootstrap)
    elif name == "through_observation":
        pair = gae.through_observations(values, rewards, mask, gamma, lam, bootstrap)
    else:
        kind: Any = {"step_average": "average", "step_last": "last"}[name]
        pair = gae.step_level(values, rewards, t.turn_ids, gamma, lam, bootstrap, kind)
    return pair[0][mask], pair[1][mask]


def episodes(trajectories: Sequence[Trajectory]) -> tuple[list[float], list[str], list[int]]:
    """(rewards, prompts, episode of each trajectory); the segments of an episode have one verdict."""
    names = list(dict.fromkeys(t.episode_id for t in trajectories))
    rewards, prompts = [], []
    for name in names:
        segments = [t for t in trajectories if t.episode_id == name]
        rewards.append(float(segments[0].reward or 0.0) + sum(sum(t.turn_rewards.values()) for t in segments))
        prompts.append(segments[0].task_id)
    return rewards, prompts, [names.index(t.episode_id) for t in trajectories]


def per_episode(name: str, rewards: list[float], prompts: list[str], memory: dict[str, Any], drift: float) -> list[float]:
    """Advantages of an outcome estimator; `memory` is carried from batch to batch."""
    if name == "grpo":
        return outcomes.grpo(rewards, prompts, "population")
    if name in ("rloo", "dr_grpo"):
        centred: list[float] = getattr(outcomes, name)(rewards, prompts)
        return centred
    if name == "batch_norm":
        return outcomes.batch_norm(rewards)
    if name == "spo":
        found = []
        for reward, prompt in zip(rewards, prompts, strict=True):
            tracker, last = memory.get(prompt, (outcomes.SpoTracker(0.06, 0.875, 0.96, 0.5), drift))
            found.append(tracker.step(reward, drift - last))
            memory[prompt] = tracker, drift
        return found
    per_prompt = name == "running_mean_prompt"
    made = outcomes.RunningMean(8 if per_prompt else 128, per_prompt, not per_prompt, 0.5 if per_prompt else 0.0)
    mean = memory.setdefault("mean", made)
    return [mean.step(reward, prompt) for reward, prompt in zip(rewards, prompts, strict=True)]


def outcome_advantages(
    name: str,
    trajectories: Sequence[Trajectory],
    memory: dict[str, Any] | None = None,
    drift: float = 0.0,
    gamma: float = 1.0,
) -> Advantages:
    """Of the arms without a critic, REINFORCE++ with its whitening included."""
    rewards, prompts, index = episodes(trajectories)
    if not name.startswith("reinforce_pp"):
        each = per_episode(name, rewards, prompts, {} if memory is None else memory, drift)
        return [np.full(t.n_actions, each[i]) for t, i in zip(trajectories, index, strict=True)]
    baseline = [0.0] * len(rewards)
    if name == "reinforce_pp_baseline":
        baseline = [r - a for r, a in zip(rewards, outcomes.dr_grpo(rewards, prompts), strict=True)]
    returns = [outcomes.return_to_go(t.token_rewards(), t.loss_mask, gamma)[t.loss_mask] for t in trajectories]
    return whitened([g - baseline[i] for g, i in zip(returns, index, strict=True)])


def whitened(advantages: Advantages, centre: bool = True) -> Advantages:
    """Over the action tokens of all trajectories."""
    white = outcomes.whiten(np.concatenate(advantages).tolist(), centre)
    return np.split(np.array(white), np.cumsum([len(a) for a in advantages])[:-1])


def denominators(norm: str, counts: Sequence[int], kept: int, max_length: float) -> list[float]:
    """What the token losses of each trajectory are divided by."""
    acting = sum(count > 0 for count in counts)
    found: list[float] = {
        "token_global": [float(sum(counts))] * len(counts),
        "token_kept": [float(kept)] * len(counts),
        "seq_mean": [float(acting * count) for count in counts],
        "seq_sum_const": [float(acting * max_length)] * len(counts),
    }[norm]
    return found


def token_losses(loss: dict[str, Any], new: list[float], rollout: list[float], advantages: np.ndarray) -> list[losses.Token]:
    """By the reference, with the options of the plug-in."""
    name = loss["id"]
    options = find("loss", name).Config(**{k: v for k, v in loss.items() if k != "id"}).model_dump()
    old = new if options.pop("old", "rollout") == "trainer" else rollout
    function = losses.ppo_clip if name in ("grpo", "dr_grpo", "dapo") else getattr(losses, name)
    found: list[losses.Token] = function(new, old, advantages.tolist(), **options)
    return found


def policy_gradient(
    folder: Path,
    trajectories: Sequence[Trajectory],
    advantages: Advantages,
    loss: dict[str, Any],
    norm: str = "token_global",
    max_length: float = 100.0,
) -> tuple[dict[str, Tensor], int]:
    """(sum over tokens of slope * grad log pi / denominator, kept tokens), with transformers' own model and attention."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    logps, slopes, kept = [], [], 0
    for t, a in zip(trajectories, advantages, strict=True):
        ids, where = torch.from_numpy(t.tokens.astype(np.int64)), torch.from_numpy(np.flatnonzero(t.loss_mask))
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        logps.append(torch.log_softmax(logits, -1)[where - 1].gather(1, ids[where, None])[:, 0])
        rollout = t.rollout_logprobs[t.loss_mask].astype(float).tolist()
        tokens = token_losses(loss, logps[-1].tolist(), rollout, a)
        slopes.append(torch.tensor([token.slope for token in tokens]))
        kept += sum(token.keep for token in tokens)
    divisors = denominators(norm, [t.n_actions for t in trajectories], kept, max_length)
    torch.stack([(s * x).sum() / d for s, x, d in zip(slopes, logps, divisors, strict=True)]).sum().backward()
    return {f"model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}, kept


def critic_gradient(
    critic: Critic,
    trajectories: Sequence[Trajectory],
    targets: Advantages,
    supervised: Sequence[np.ndarray] | None = None,
    old: Sequence[np.ndarray] | None = None,
    clip: float | None = None,
) -> dict[str, Tensor]:
    """Of the mean over supervised tokens of (V - G)^2, or of PPO's clipped error where that is larger.

    targets and old (values): on the action tokens. supervised: [L] each, all action tokens if not given.
    """
    critic.zero_grad()
    total, n = torch.zeros(()), 0
    for i, t in enumerate(trajectories):
        chosen = t.loss_mask if supervised is None else supervised[i]
        mine = torch.from_numpy(chosen[t.loss_mask])
        after = critic(torch.from_numpy(t.tokens), torch.arange(len(t)), [0, len(t)])
        v = after[torch.from_numpy(np.flatnonzero(chosen)) - 1]
        g = torch.from_numpy(targets[i]).float()[mine]
        slope = 2 * (v - g).detach()
        if old is not None and clip is not None:
            before = torch.from_numpy(old[i]).float()[mine]
            near = v.detach().clamp(before - clip, before + clip)
            slope = torch.where((near - g) ** 2 > (v.detach() - g) ** 2, 0.0, slope)
        total, n = total + (slope * v).sum(), n + int(chosen.sum())
    (total / n).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in critic.named_parameters() if p.requires_grad and p.grad is not None}

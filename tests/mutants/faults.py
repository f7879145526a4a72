"""The planted faults: one wrong line each, of the kinds that real trainers have shipped, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """`file` with `right` (which occurs exactly once) replaced by `wrong` must make one of `tests` fail."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


GOLDEN = "tests/golden/test_algorithm_vectors.py"
REFERENCE = "tests/reference/test_against_torch.py"
STEP = "tests/trainer/test_step.py"

FAULTS = (
    Fault("sign of the policy loss", "trainer/losses/dis.py", "(-coefficient *", "(coefficient *", (GOLDEN,)),
    Fault("importance weight not detached", "trainer/losses/dis.py", "log_weight.detach()", "log_weight", (GOLDEN,)),
    Fault("closed band", "trainer/losses/dis.py", "(delta < high)", "(delta <= high)", ("tests/unit/test_dis.py",)),
    Fault("band read as [eps_low, eps_high]", "trainer/losses/dis.py", "math.log1p(-eps_low)", "math.log(eps_low)", (GOLDEN,)),
    Fault(
        "exp before select",
        "trainer/losses/dis.py",
        "torch.where(keep, torch.where(keep, log_weight.detach(), 0.0).exp(), 0.0)",
        "log_weight.detach().exp() * keep",
        ("tests/unit/test_dis.py", "tests/unit/test_losses.py"),
    ),
    Fault("values off by one", "trainer/critic_step.py", "return after.roll(1), after", "return after, after", (STEP,)),
    Fault("critic trained off by one", "trainer/critic_step.py", "packed.cu_seqlens).roll(1)", "packed.cu_seqlens)", (STEP,)),
    Fault(
        "reward on a trailing observation",
        "harness/trajectory.py",
        "rewards[where[-1]] += self.reward",
        "rewards[-1] += self.reward",
        ("tests/unit/test_trajectory.py",),
    ),
    Fault(
        "loss averaged per micro-batch",
        "trainer/step.py",
        'trajectory_weights(objective.settings["loss_norm"], batch.counts, totals)',
        'trajectory_weights(objective.settings["loss_norm"], batch.counts, Totals(float(batch.counts.sum()), 1.0, 1.0))',
        (STEP,),
    ),
    Fault(
        "critic loss averaged per micro-batch",
        "trainer/critic_step.py",
        "clip=clip).sum() / max(tokens, 1.0)",
        "clip=clip).sum() / max(float(mask.sum()), 1.0)",
        (STEP,),
    ),
    Fault(
        "loss divided per rank",
        "trainer/policy_step.py",
        "(loss * dist.get_world_size())",
        "loss",
        ("tests/trainer/test_ranks.py",),
    ),
    Fault(
        "whitening over observations",
        "trainer/advantages/whiten.py",
        "selected = adv[mask].double()",
        "selected = adv.double()",
        (REFERENCE,),
    ),
    Fault(
        "post and pre swapped",
        "trainer/step.py",
        'post = objective.settings["advantage_values"] == "post"',
        'post = objective.settings["advantage_values"] != "post"',
        (STEP,),
    ),
    Fault("K ignored", "trainer/step.py", "range(options.critic_updates)", "range(1)", (STEP,)),
    Fault(
        "targets move between the K updates",
        "trainer/step.py",
        "        loss = critic_step.backward(critic, batches, objective)\n",
        "        critic_step.evaluate(critic, batches, objective)\n"
        "        loss = critic_step.backward(critic, batches, objective)\n",
        (STEP,),
    ),
    Fault(
        "critic's lambda for the policy",
        "trainer/estimate.py",
        "lam = objective.policy_lambda(objective.critic.length(inputs))",
        'lam = objective.settings["lam"]',
        (STEP,),
    ),
    Fault(
        "policy's lambda for the critic",
        "trainer/critic_step.py",
        'objective.critic.estimate(inputs, settings["lam"])',
        "objective.critic.estimate(inputs, objective.policy_lambda(objective.critic.length(inputs)))",
        (STEP,),
    ),
    Fault(
        "lambda = 1 - 1 / alpha^l",
        "trainer/advantages/gae.py",
        "1.0 / (alpha * n_actions.double())",
        "1.0 / (alpha ** n_actions.double())",
        (GOLDEN,),
    ),
    Fault(
        "GAE does not end with its trajectory", "trainer/advantages/gae.py", "    weight[last] = 0.0\n", "", (GOLDEN, REFERENCE)
    ),
    Fault(
        "GAE walks through observations",
        "trainer/advantages/gae.py",
        "    actions = mask.nonzero().squeeze(1)\n    v, u",
        "    actions = torch.arange(len(mask))\n    v, u",
        (GOLDEN,),
    ),
    Fault(
        "bootstrap forgotten",
        "trainer/critic_step.py",
        'batch.truncated * last if settings["truncation"] == "bootstrap" else torch.zeros_like(last)',
        "torch.zeros_like(last)",
        (STEP,),
    ),
    Fault(
        "critic frozen as a whole",
        "trainer/freeze.py",
        'return group in _MLP or group == "value_head"',
        "return group in _MLP",
        ("tests/unit/test_freeze.py",),
    ),
    Fault(
        "router trains with the experts",
        "trainer/freeze.py",
        '_MLP = frozenset({"experts", "shared_expert", "dense_mlp"})',
        '_MLP = frozenset({"experts", "shared_expert", "dense_mlp", "router"})',
        ("tests/unit/test_freeze.py",),
    ),
    Fault(
        "step taken although every token was rejected",
        "trainer/step.py",
        "if options.update_policy and kept:",
        "if options.update_policy:",
        (STEP,),
    ),
    Fault(
        "running mean sees its own reward",
        "trainer/advantages/running_mean.py",
        "seen = recent[key] if inclusive else before",
        "seen = recent[key]",
        (GOLDEN,),
    ),
    Fault(
        "value of a turn is that of its first token",
        "trainer/advantages/step.py",
        "token_v[_last(first)]",
        "token_v[first]",
        (GOLDEN,),
    ),
    Fault(
        "log-ratios that are not finite are used",
        "trainer/losses/types.py",
        "(new.detach() - old).isfinite()",
        "True",
        ("tests/unit/test_losses.py",),
    ),
    Fault(
        "group statistics over the batch",
        "trainer/advantages/group.py",
        "members.setdefault(prompt, [])",
        'members.setdefault("", [])',
        (REFERENCE,),
    ),
)

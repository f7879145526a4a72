"""What one step reports: exactly these names, so that none vanishes unseen; when the costly ones come; the frozen guard."""

from __future__ import annotations

import json
import math
import re
from itertools import chain
from pathlib import Path

import pytest
import torch

from harness.errors import InvariantError
from tests.trainer import support
from trainer.report import FrozenGuard

pytestmark = pytest.mark.usefixtures("rank")

DECILES = "{0,1,2,3,4,5,6,7,8,9}"
STALE = "{0,1,2,3_4,5_8,9}"
LIMITS = "{max_context,max_tokens_per_turn,max_turns,wall_clock}"
MODULES = "{attention,embeddings,experts,norms,router}"
EVERY_ARM = [
    "adv/{mean,std,abs,min,max,frac_pos}",
    f"adv/pos_{DECILES}",
    "async/mixed_version_frac",
    "batch/{action_tokens,episodes,unique_prompts}",
    "data/nonfinite_rollout_logp",
    "delta/{max_abs,p0.1,p1,p50,p99,p99.9}",
    "dis/{all_masked,ess,ess_kept,kept_tokens,lost_abs_adv,max_traj_mask_frac,mean_ratio,mean_ratio_fresh,traj_all_masked}",
    "dis/mask_{frac,low,high}",
    "dis/mask_{frac,low,high}/adv_{pos,neg}",
    f"dis/mask_{{frac,low,high}}/{{pos,len}}_{DECILES}",
    f"dis/mask_{{frac,low,high}}/stale_{STALE}",
    "entropy/{exact,exact_turn_first,sampled,rollout_sampled}",
    "{grad,clip,lr}/policy",
    f"grad/policy/{MODULES}",
    f"grad/policy/{MODULES}_rms",
    "kl/{k1,k2,k3,k1_fresh,k3_fresh}",
    "kl_train/{k1,k3}",
    "mismatch/{abs_logp_diff,token_mult_prob_error}",
    "mismatch/{abs_logp_diff,token_mult_prob_error}_fresh",
    f"reward/{LIMITS}",
    "reward/finished",
    "rollout/{action_frac,action_tokens,observation_tokens,repeated_4gram,turns,truncated}",
    f"rollout/truncated_{LIMITS}",
    "rollout/success_turns_{le_2,le_5,le_10,gt_10}",
    "staleness/{mean,max,p50,p95,traj_max,traj_span,traj_versions}",
    f"staleness/frac_{STALE}",
]
WITH_CRITIC = [
    "{grad,clip,lr}/critic_{0,1}",
    f"grad/critic_{{0,1}}/{MODULES}",
    f"grad/critic_{{0,1}}/{MODULES}_rms",
    "grad/critic_{0,1}/{value_head,value_head_rms}",
    "lambda/{mean,length_mean,end_weight}",
    "value/{ev,ev_traj,ev_first,bias,mae,mse,mse_0,mse_1,ece,auroc_first,clip_oob}",
    f"value/calib_{{g,n}}_{DECILES}",
    "value/{first,mid,last}_{success,failure}",
]
AFTER_THE_UPDATES = ["value/{ev_post,leak,leak_signflip}"]
OF_THE_UPDATE = [f"update/policy/{MODULES}"]
OF_THE_CRITICS_UPDATE = [f"update/critic_{{0,1}}/{MODULES}", "update/critic_{0,1}/value_head"]


def expand(pattern: str) -> list[str]:
    """Braces as a shell expands them."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    parts = (pattern[: found.start()] + word + pattern[found.end() :] for word in found[1].split(","))
    return list(chain.from_iterable(expand(part) for part in parts))


def names(*tables: list[str]) -> set[str]:
    """Of several tables."""
    each = [name for table in tables for pattern in table for name in expand(pattern)]
    assert len(each) == len(set(each))
    return set(each)


@pytest.mark.parametrize("number", [1, 9, 10, 20])
@pytest.mark.parametrize("when", ["pre", "post"])
def test_names_of_a_critic_arm(moe: Path, when: str, number: int) -> None:
    """The second look at the critic is free with `post`, and taken on every tenth step with `pre`."""
    made = support.learners(moe)
    algorithm = support.algorithm(advantage_values=when)
    metrics = support.step(made, support.grouped(0), algorithm, number=number)["metrics"]
    seldom = number % 10 == 0
    tables = [EVERY_ARM, WITH_CRITIC]
    tables += [AFTER_THE_UPDATES] if when == "post" or seldom else []
    tables += [OF_THE_UPDATE, OF_THE_CRITICS_UPDATE] if seldom else []
    assert set(metrics) == names(*tables)
    if "value/leak" in metrics:
        assert metrics["value/leak"] > 0.0 and 0.0 <= metrics["value/leak_signflip"] <= 1.0
        assert metrics["value/ev_post"] != metrics["value/ev"]


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_pp", "spo"])
@pytest.mark.parametrize("number", [9, 10])
def test_names_of_an_arm_without_critic(moe: Path, estimator: str, number: int) -> None:
    made = support.without_critic(moe)
    algorithm = support.algorithm(advantage={"id": estimator})
    metrics = support.step(made, support.grouped(0), algorithm, number=number)["metrics"]
    assert set(metrics) == names(EVERY_ARM, *([OF_THE_UPDATE] if number == 10 else []))


def test_names_while_the_policy_stands(moe: Path) -> None:
    metrics = support.step(support.learners(moe), support.grouped(0), update_policy=False)["metrics"]
    missing = names(EVERY_ARM, WITH_CRITIC, AFTER_THE_UPDATES) - set(metrics)
    assert missing == names(["{grad,clip,lr}/policy", f"grad/policy/{MODULES}", f"grad/policy/{MODULES}_rms"])


def test_every_row_is_json(moe: Path) -> None:
    """None where undefined: no number of a row may be NaN or infinite, also for one episode, or for rewards all alike."""
    for batch in (support.grouped(0), support.batch(0, 1), [t.judged(1.0) for t in support.batch(1, 3)]):
        result = support.step(support.learners(moe), batch, number=10)
        json.dumps(result, allow_nan=False)
        assert all(x is None or (isinstance(x, float) and math.isfinite(x)) for x in result["metrics"].values())


def test_frozen_groups_have_no_gradient(moe: Path) -> None:
    """Exactly none before clipping, and no update; the policy's attention has both."""
    metrics = support.step(support.learners(moe), support.grouped(0), number=10)["metrics"]
    for k in (0, 1):
        for group in ("attention", "embeddings", "norms", "router"):
            assert metrics[f"grad/critic_{k}/{group}"] == metrics[f"grad/critic_{k}/{group}_rms"] == 0.0
            assert metrics[f"update/critic_{k}/{group}"] == 0.0
        for group in ("experts", "value_head"):
            assert metrics[f"grad/critic_{k}/{group}"] > 0.0 and metrics[f"update/critic_{k}/{group}"] > 0.0
    assert metrics["grad/policy/attention"] > 0.0 and metrics["update/policy/attention"] > 0.0
    total = math.sqrt(sum(metrics[f"grad/critic_0/{g}"] ** 2 for g in ("experts", "value_head")))
    assert metrics["grad/critic_0"] == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.q_proj.weight", "model.norm.weight", "model.layers.0.mlp.gate.weight"]
)
def test_the_guard_sees_one_touched_element(moe: Path, name: str) -> None:
    """On every fiftieth step."""
    made = support.learners(moe)
    assert made.critic is not None
    made.guard = FrozenGuard(made.critic)
    assert support.step(made, support.grouped(0), number=50)["stepped"], "what trains may move"
    touched = dict(made.critic.named_parameters())[name]
    with torch.no_grad():
        local = touched.to_local() if hasattr(touched, "to_local") else touched
        local.view(-1)[3] += 1e-6
    assert support.step(made, support.grouped(1), number=51)["stepped"]
    with pytest.raises(InvariantError, match="frozen"):
        support.step(made, support.grouped(0), number=100)

"""Every policy loss of the catalog against its closed form, in a float64 loop over trajectories and tokens."""

from __future__ import annotations

import importlib
import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from trainer.losses import catalog, types
from trainer.losses.sequence import mean_log_ratio
from trainer.losses.types import PolicyLossInput, PolicyLossOutput
from trainer.losses.value import value_loss

ROOT = Path(__file__).parents[2]
CATALOG: dict[str, Any] = {
    "dis": catalog.Dis,
    "ppo_clip": catalog.PpoClip,
    "grpo": catalog.Grpo,
    "dr_grpo": catalog.DrGrpo,
    "dapo": catalog.Dapo,
    "gspo": catalog.Gspo,
    "cispo": catalog.Cispo,
    "tis": catalog.Tis,
    "mis": catalog.Mis,
    "sequence_rejection": catalog.SequenceRejection,
}
SURROGATES = {"ppo_clip", "grpo", "dr_grpo", "dapo", "gspo"}
SEQUENCE = {"gspo", "sequence_rejection"}
NEVER_REJECT = {"cispo", "tis"}
OLD = {name for name, plugin in CATALOG.items() if "old" in plugin.Config.model_fields}
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in sorted(CATALOG.keys() - OLD)]
CASES += [(name, {"old": old}) for name in sorted(OLD) for old in ("rollout", "trainer")]
ALL = pytest.mark.parametrize("name", CATALOG)


def function(name: str) -> Callable[..., PolicyLossOutput]:
    module, attribute = CATALOG[name].function.split(":")
    return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]


def loss(name: str, inputs: PolicyLossInput, **options: Any) -> PolicyLossOutput:
    return function(name)(inputs, **CATALOG[name].Config(**options).model_dump())


def gradient(output: PolicyLossOutput, inputs: PolicyLossInput) -> Tensor:
    (g,) = torch.autograd.grad(output.token_loss.sum(), inputs.logprobs)
    return g


def packed(seed: int = 0) -> PolicyLossInput:
    """Twenty trajectories with log-ratios from 1e-4 to beyond every band, an empty one and one without action tokens."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (20,), generator=rng)
    lengths[3] = lengths[19] = 0
    scale = torch.tensor([1e-4, 5e-4, 2e-3, 0.3, 1.5])[torch.arange(20) % 5].repeat_interleave(lengths)
    n = int(lengths.sum())
    logprobs = -torch.rand(n, generator=rng) * 4
    rollout, old = (logprobs - scale * torch.randn(n, generator=rng) for _ in range(2))
    mask = torch.rand(n, generator=rng) < 0.8
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    mask[cu_seqlens[7] : cu_seqlens[8]] = False
    return PolicyLossInput(logprobs.requires_grad_(), rollout, torch.randn(n, generator=rng), mask, cu_seqlens, old)


def tokens(deltas: list[float], advantages: list[float], mask: list[bool] | None = None) -> PolicyLossInput:
    """Trajectories of one token with logp = 0 and logp of either behaviour = -delta, so that Delta is exactly fp32(delta)."""
    n = len(deltas)
    behaviour = -torch.tensor(deltas)
    marks = torch.tensor(mask or [True] * n)
    return PolicyLossInput(
        torch.zeros(n, requires_grad=True), behaviour, torch.tensor(advantages), marks, torch.arange(n + 1), behaviour.clone()
    )


def expected_weight(name: str, o: dict[str, Any], rho: float, s: float, advantage: float) -> float:
    """The factor of A * grad log pi, from the formulas of specification 1.3 and 5.1."""
    ratio = s if name in SEQUENCE else rho
    if name in SURROGATES:
        clipped = min(max(ratio, 1 - o["eps_low"]), 1 + o["eps_high"])
        return ratio if ratio * advantage <= clipped * advantage else 0.0
    if name == "dis":
        return ratio if 1 - o["eps_low"] < ratio < 1 + o["eps_high"] else 0.0
    if name in NEVER_REJECT:
        cap: float = o["cap"] if name == "tis" else 1 + o["eps_high"]
        return min(ratio, cap)
    inside: bool = o["low"] <= ratio <= o["high"]
    return inside * (1.0 if name == "sequence_rejection" else ratio)


def reference(name: str, options: dict[str, Any], inputs: PolicyLossInput) -> Tensor:
    """Weights, [N] fp64, in Python's loops."""
    o = CATALOG[name].Config(**options).model_dump()
    below = inputs.old_logprobs if o.get("old", "rollout") == "trainer" else inputs.rollout_logprobs
    assert below is not None and inputs.cu_seqlens is not None
    delta, weights = (inputs.logprobs.detach().double() - below.double()).tolist(), [0.0] * len(below)
    edges, mask, advantages = inputs.cu_seqlens.tolist(), inputs.mask.tolist(), inputs.advantages.tolist()
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        actions = [t for t in range(start, end) if mask[t]]
        for t in actions:
            s = math.exp(sum(delta[i] for i in actions) / len(actions))
            weights[t] = expected_weight(name, o, math.exp(delta[t]), s, advantages[t])
    return torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_keep_weight_loss_and_gradient_are_the_closed_form(name: str, options: dict[str, Any]) -> None:
    inputs = packed()
    output = loss(name, inputs, **options)
    weight = reference(name, options, inputs)
    assert output.keep.tolist() == (weight > 0).tolist()
    assert output.keep.any()
    assert (output.keep < inputs.mask).any() != (name in NEVER_REJECT), "the case would not show a rejection"
    torch.testing.assert_close(output.weight.double(), weight, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradient(output, inputs).double(), -weight * inputs.advantages, atol=1e-6, rtol=1e-5)
    value = -weight * inputs.advantages * (1.0 if name in SURROGATES else inputs.logprobs.detach())
    torch.testing.assert_close(output.token_loss.detach().double(), value, atol=1e-6, rtol=1e-5)
    assert not output.weight.requires_grad and not output.keep.requires_grad


@pytest.mark.parametrize("name", sorted(OLD))
def test_without_old_logprobs_the_trainer_ratio_is_one(name: str) -> None:
    inputs = replace(packed(), old_logprobs=None, rollout_logprobs=torch.full_like(packed().rollout_logprobs, math.nan))
    output = loss(name, inputs, old="trainer")
    assert output.weight.tolist() == inputs.mask.float().tolist()
    assert torch.equal(gradient(output, inputs), torch.where(inputs.mask, -inputs.advantages, 0.0))


@ALL
def test_on_policy_it_is_reinforce(name: str) -> None:
    inputs = packed()
    same = inputs.logprobs.detach()
    inputs = replace(inputs, rollout_logprobs=same, old_logprobs=same)
    output = loss(name, inputs)
    reinforce = -(inputs.advantages * inputs.logprobs)[inputs.mask].sum()
    (wanted,) = torch.autograd.grad(reinforce, inputs.logprobs)
    torch.testing.assert_close(gradient(output, inputs), wanted, atol=0, rtol=0)
    assert torch.equal(output.keep, inputs.mask)


UPPER = {"ppo_clip": 0.2, "grpo": 0.2, "dr_grpo": 0.2, "dapo": 0.28, "gspo": 4e-4}
LOWER = {"ppo_clip": 0.2, "grpo": 0.2, "dr_grpo": 0.2, "dapo": 0.2, "gspo": 3e-4}
BANDS = {"mis": (0.5, 5.0), "sequence_rejection": (0.999, 1.002)}
CLOSED = [
    *[(name, 1.0, math.log1p(eps)) for name, eps in UPPER.items()],
    *[(name, -1.0, math.log1p(-eps)) for name, eps in LOWER.items()],
    *[(name, advantage, math.log(bound)) for name, band in BANDS.items() for bound in band for advantage in (1.0, -1.0)],
]


def around(bound: float) -> list[float]:
    """The fp32 numbers next to a bound: towards zero, itself, away from zero."""
    at = torch.tensor(bound)
    return [torch.nextafter(at, torch.tensor(0.0)).item(), at.item(), torch.nextafter(at, at * 2).item()]


@pytest.mark.parametrize(("name", "advantage", "bound"), CLOSED)
def test_bounds_are_closed(name: str, advantage: float, bound: float) -> None:
    options = {"old": "rollout"} if name in OLD else {}
    output = loss(name, tokens(around(bound), [advantage] * 3), **options)
    assert output.keep.tolist() == [True, True, False]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("bound", [math.log1p(-0.8), math.log(4)])
def test_dis_bounds_are_open(bound: float, advantage: float) -> None:
    assert loss("dis", tokens(around(bound), [advantage] * 3)).keep.tolist() == [True, False, False]


@pytest.mark.parametrize(("name", "cap"), [("cispo", 1.28), ("tis", 2.0)])
def test_capped_weights_saturate(name: str, cap: float) -> None:
    inputs = tokens([math.log(cap) - 0.01, math.log(cap), 5.0, -5.0], [1.0, 1.0, -2.0, 1.0])
    output = loss(name, inputs)
    torch.testing.assert_close(output.weight, torch.tensor([cap * math.exp(-0.01), cap, cap, math.exp(-5.0)]))
    torch.testing.assert_close(gradient(output, inputs), -output.weight * inputs.advantages)


@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_the_sign_of_the_advantage_chooses_the_clipped_side(name: str) -> None:
    inputs = tokens([0.5, 0.5, -0.5, -0.5], [1.0, -1.0, 1.0, -1.0])
    output = loss(name, inputs, old="rollout")
    assert output.keep.tolist() == [False, True, True, False]
    torch.testing.assert_close(gradient(output, inputs), torch.tensor([0.0, math.exp(0.5), -math.exp(-0.5), 0.0]))


@pytest.mark.parametrize("name", sorted(set(CATALOG) - SURROGATES))
def test_elsewhere_the_sign_of_the_advantage_changes_only_the_sign(name: str) -> None:
    inputs = packed()
    flipped = replace(inputs, advantages=-inputs.advantages)
    a, b = loss(name, inputs), loss(name, flipped)
    assert torch.equal(a.keep, b.keep) and torch.equal(a.weight, b.weight)
    g = gradient(a, inputs)
    assert torch.equal(g, -gradient(b, flipped))
    assert (g[a.keep].sign() == -inputs.advantages[a.keep].sign()).all()


@pytest.mark.parametrize("poison", [math.nan, 1e9, -1e9, math.inf])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_nothing_on_an_observation_is_read(name: str, options: dict[str, Any], poison: float) -> None:
    inputs = packed()
    assert inputs.old_logprobs is not None

    def poisoned(x: Tensor) -> Tensor:
        return torch.where(inputs.mask, x.detach(), poison)

    dirty = replace(
        inputs,
        logprobs=poisoned(inputs.logprobs).requires_grad_(),
        rollout_logprobs=poisoned(inputs.rollout_logprobs),
        advantages=poisoned(inputs.advantages),
        old_logprobs=poisoned(inputs.old_logprobs),
    )
    a, b = loss(name, inputs, **options), loss(name, dirty, **options)
    assert torch.equal(a.token_loss, b.token_loss)
    assert torch.equal(a.keep, b.keep) and torch.equal(a.weight, b.weight)
    assert torch.equal(gradient(a, inputs), gradient(b, dirty))
    assert not b.token_loss[~inputs.mask].any() and not b.weight[~inputs.mask].any() and not b.keep[~inputs.mask].any()


@pytest.mark.parametrize("side", ["logprobs", "behaviour"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("delta", [1000.0, -1000.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_wild_log_ratios_stay_finite_and_alone(
    name: str, options: dict[str, Any], delta: float, advantage: float, side: str
) -> None:
    inputs = tokens([0.0, 0.0 if side == "logprobs" else delta, 0.0], [advantage] * 3)
    if side == "logprobs":
        inputs = replace(inputs, logprobs=torch.tensor([0.0, delta, 0.0], requires_grad=True))
    output = loss(name, inputs, **options)
    g = gradient(output, inputs)
    assert output.token_loss.isfinite().all() and output.weight.isfinite().all() and g.isfinite().all()
    assert output.keep.tolist() == [True, name in NEVER_REJECT and math.isfinite(delta), True]
    assert g[[0, 2]].tolist() == [-advantage] * 2
    if not output.keep[1]:
        assert output.token_loss[1] == output.weight[1] == g[1] == 0.0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_surrogate_takes_a_log_ratio_beyond_20_for_broken_data(advantage: float) -> None:
    keep = loss("ppo_clip", tokens([19.9, 20.1, -19.9, -20.1], [advantage] * 4), old="rollout").keep
    assert keep.tolist() == ([False, False, True, False] if advantage > 0 else [True, False, False, False])


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", sorted(SEQUENCE))
def test_one_broken_record_rejects_its_trajectory_and_no_other(name: str, broken: float) -> None:
    inputs = tokens([0.0, 0.0, broken, 0.0, 0.0], [1.0] * 5)
    inputs = replace(inputs, cu_seqlens=torch.tensor([0, 1, 4, 5]))
    output = loss(name, inputs)
    assert output.keep.tolist() == [True, False, False, False, True]
    assert gradient(output, inputs).tolist() == [-1.0, 0.0, 0.0, 0.0, -1.0]


@pytest.mark.parametrize("name", sorted(SEQUENCE))
def test_sequence_losses_need_the_trajectories(name: str) -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        loss(name, replace(packed(), cu_seqlens=None))


@pytest.mark.parametrize("cu_seqlens", [[0], [0, 0], [0, 0, 0]])
@ALL
def test_empty_input(name: str, cu_seqlens: list[int]) -> None:
    inputs = replace(tokens([], []), mask=torch.zeros(0, dtype=torch.bool), cu_seqlens=torch.tensor(cu_seqlens))
    output = loss(name, inputs)
    assert output.token_loss.shape == output.keep.shape == output.weight.shape == (0,)
    assert gradient(output, inputs).shape == (0,)


@ALL
def test_no_action_tokens_is_a_zero_loss_with_a_backward_pass(name: str) -> None:
    inputs = tokens([math.nan, 0.0, 3.0], [1.0, 1.0, 1.0], mask=[False] * 3)
    output = loss(name, replace(inputs, cu_seqlens=torch.tensor([0, 2, 2, 3])))
    assert output.token_loss.requires_grad
    assert output.token_loss.tolist() == gradient(output, inputs).tolist() == [0.0] * 3


def test_the_mean_log_ratio_is_finite_everywhere() -> None:
    inputs = tokens(
        [1.0, 3.0, math.nan, 2.0, 5.0, math.inf, 1.0], [1.0] * 7, mask=[True, True, False, False, True, True, False]
    )
    mean, valid = mean_log_ratio(replace(inputs, cu_seqlens=torch.tensor([0, 3, 3, 4, 6, 7])), "rollout")
    assert mean.tolist() == [2.0, 2.0, 2.0, 0.0, 2.5, 2.5, 0.0]
    assert valid.tolist() == [True, True, False, False, False, False, False]


@ALL
def test_bf16_is_computed_in_fp32(name: str) -> None:
    full = packed()
    assert full.old_logprobs is not None
    half = replace(
        full,
        logprobs=full.logprobs.detach().bfloat16().requires_grad_(),
        rollout_logprobs=full.rollout_logprobs.bfloat16(),
        advantages=full.advantages.bfloat16(),
        old_logprobs=full.old_logprobs.bfloat16(),
    )
    output = loss(name, half)
    assert output.token_loss.dtype == output.weight.dtype == torch.float32
    torch.testing.assert_close(output.weight.double(), reference(name, {}, half), atol=1e-6, rtol=1e-5)


@ALL
def test_catalog_options_are_the_keywords_of_the_function(name: str) -> None:
    parameters = list(inspect.signature(function(name)).parameters.values())[1:]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters)
    fields = CATALOG[name].Config.model_fields
    assert {p.name: p.default for p in parameters} == {key: field.default for key, field in fields.items()}
    hints = get_type_hints(function(name))
    assert {p.name: hints[p.name] for p in parameters} == {key: field.annotation for key, field in fields.items()}


@ALL
def test_catalog_declarations(name: str) -> None:
    assert CATALOG[name].norm in get_args(catalog.Norm)
    assert CATALOG[name].__doc__ and CATALOG[name].Config.__doc__
    with pytest.raises(ValidationError):
        CATALOG[name].Config(nonsense=1)
    for key, field in CATALOG[name].Config.model_fields.items():
        wrong: list[Any] = ["elsewhere"] if key == "old" else [0.0, -0.1, math.nan, math.inf]
        for bad in wrong:
            with pytest.raises(ValidationError):
                CATALOG[name].Config(**{key: bad})
        assert CATALOG[name].Config(**{key: field.default}) == CATALOG[name].Config()


def test_catalog_has_every_loss_and_its_norm() -> None:
    found = {value for value in vars(catalog).values() if isinstance(value, type) and hasattr(value, "function")}
    assert found == set(CATALOG.values())
    assert {name: plugin.norm for name, plugin in CATALOG.items() if plugin.norm != "token_global"} == {
        "grpo": "seq_mean",
        "gspo": "seq_mean",
        "dr_grpo": "seq_sum_const",
    }
    assert catalog.Behaviour == types.Behaviour


@pytest.mark.parametrize("name", ["mis", "sequence_rejection"])
def test_a_band_is_ordered(name: str) -> None:
    for low, high in ((2.0, 1.0), (1.0, 1.0)):
        with pytest.raises(ValidationError, match="low must be below high"):
            CATALOG[name].Config(low=low, high=high)


def test_the_catalog_imports_no_torch() -> None:
    code = "import sys, trainer.losses.catalog; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


def test_value_clipping() -> None:
    values = torch.tensor([0.5, 1.5, 0.95, 1.05, math.nan], requires_grad=True)
    targets = torch.tensor([0.0, 1.0, 0.0, 1.3, math.nan])
    old, mask = torch.tensor([1.0, 1.0, 1.0, 1.0, math.nan]), torch.tensor([True, True, True, True, False])
    loss = value_loss(values, targets, mask, old_values=old, clip=0.2)
    (g,) = torch.autograd.grad(loss.sum(), values)
    torch.testing.assert_close(loss.detach(), torch.tensor([0.8**2, 0.5**2, 0.95**2, 0.25**2, 0.0]))
    torch.testing.assert_close(g, torch.tensor([0.0, 1.0, 1.9, -0.5, 0.0]))
    plain = value_loss(values, targets, mask, old_values=old)
    assert torch.equal(plain, value_loss(values, targets, mask))
    torch.testing.assert_close(plain.detach()[:2], torch.tensor([0.25, 0.25]))
    with pytest.raises(ValueError, match="old_values"):
        value_loss(values, targets, mask, clip=0.2)

"""The DIS policy loss and the value loss: gradients, the open band, and numbers that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.losses.dis import dis_loss
from trainer.losses.types import PolicyLossInput, PolicyLossOutput
from trainer.losses.value import value_loss

BANDS = st.sampled_from([(0.3, 5.0), (0.8, 3.0), (1.0, 1.0), (1.5, math.inf)])
SEEDS = st.integers(0, 2**31)


def random_inputs(seed: int, n: int = 64) -> PolicyLossInput:
    rng = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(n, generator=rng) * 6
    logprobs = (rollout + torch.randn(n, generator=rng)).requires_grad_()
    return PolicyLossInput(logprobs, rollout, torch.randn(n, generator=rng), torch.rand(n, generator=rng) < 0.7)


def gradient(output: PolicyLossOutput, inputs: PolicyLossInput) -> Tensor:
    (g,) = torch.autograd.grad(output.token_loss.sum(), inputs.logprobs)
    return g


def single(delta: float, eps_low: float, eps_high: float, mask: bool = True) -> tuple[PolicyLossOutput, Tensor]:
    """One token with logp_rollout = -delta and logp = 0, so that Delta is exactly fp32(delta)."""
    logprobs = torch.zeros(1, requires_grad=True)
    inputs = PolicyLossInput(logprobs, torch.tensor([-delta]), torch.ones(1), torch.tensor([mask]))
    output = dis_loss(inputs, eps_low=eps_low, eps_high=eps_high)
    return output, gradient(output, inputs)


@settings(max_examples=200, deadline=None)
@given(SEEDS, BANDS)
def test_gradient_is_the_detached_one(seed: int, band: tuple[float, float]) -> None:
    inputs = random_inputs(seed)
    output = dis_loss(inputs, eps_low=band[0], eps_high=band[1])
    rho = (inputs.logprobs - inputs.rollout_logprobs).double().exp()
    in_band = inputs.mask & (rho > 1 - band[0]) & (rho < 1 + band[1])
    weight = torch.where(in_band, rho, 0.0).detach()
    torch.testing.assert_close(output.weight.double(), weight, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient(output, inputs).double(), -weight * inputs.advantages, atol=1e-5, rtol=1e-5)
    value = -weight * inputs.advantages * inputs.logprobs.detach()
    torch.testing.assert_close(output.token_loss.detach().double(), value, atol=1e-5, rtol=1e-5)


def test_gradient_differs_from_the_non_detached_one() -> None:
    inputs = random_inputs(0)
    output = dis_loss(inputs, eps_low=0.3, eps_high=5.0)
    rho = (inputs.logprobs - inputs.rollout_logprobs).exp()
    naive = -(torch.where(output.keep, rho, 0.0) * inputs.advantages * inputs.logprobs).sum()
    (wrong,) = torch.autograd.grad(naive, inputs.logprobs)
    right = gradient(output, inputs)
    improbable = output.keep & (inputs.logprobs < -1)
    assert improbable.any()
    assert (wrong[improbable].sign() == -right[improbable].sign()).all()


@settings(max_examples=100, deadline=None)
@given(SEEDS, BANDS)
def test_keep_and_weight_do_not_see_the_sign_of_the_advantage(seed: int, band: tuple[float, float]) -> None:
    inputs = random_inputs(seed)
    flipped = PolicyLossInput(inputs.logprobs, inputs.rollout_logprobs, -inputs.advantages, inputs.mask)
    a, b = (dis_loss(x, eps_low=band[0], eps_high=band[1]) for x in (inputs, flipped))
    assert torch.equal(a.keep, b.keep)
    assert torch.equal(a.weight, b.weight)
    assert torch.equal(gradient(a, inputs), -gradient(b, flipped))


@pytest.mark.parametrize(("bound", "band"), [(math.log(0.5), (0.5, 3.0)), (math.log(2.0), (0.5, 1.0))])
def test_the_band_is_open(bound: float, band: tuple[float, float]) -> None:
    at = torch.tensor(bound)
    inside = torch.nextafter(at, torch.tensor(0.0)).item()
    outside = torch.nextafter(at, at * 2).item()
    assert not single(at.item(), *band)[0].keep.item()
    assert single(inside, *band)[0].keep.item()
    assert not single(outside, *band)[0].keep.item()


def test_eps_low_1_has_no_lower_bound() -> None:
    for eps_low in (1.0, 1.5):
        assert single(-80.0, eps_low, 5.0)[0].keep.item()
    assert not single(-80.0, 0.999, 5.0)[0].keep.item()


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("eps_low", [0.3, 1.0])
@pytest.mark.parametrize("delta", [1000.0, -1000.0, math.inf, -math.inf, math.nan])
def test_wild_log_ratios_stay_finite(delta: float, eps_low: float, mask: bool) -> None:
    output, g = single(delta, eps_low, 5.0, mask)
    assert output.token_loss.isfinite().all()
    assert output.weight.isfinite().all()
    assert g.isfinite().all()
    assert output.keep.item() == (mask and eps_low == 1.0 and delta == -1000.0)
    assert g.item() == 0.0


@pytest.mark.parametrize("delta", [math.inf, -math.inf, math.nan])
def test_an_unbounded_band_still_rejects_what_is_not_finite(delta: float) -> None:
    output, g = single(delta, 1.0, math.inf)
    assert not output.keep.item()
    assert output.token_loss.item() == g.item() == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nothing_on_an_observation_is_read(bad: float) -> None:
    logprobs = torch.tensor([-1.0, bad], requires_grad=True)
    inputs = PolicyLossInput(logprobs, torch.tensor([-1.0, bad]), torch.tensor([1.0, bad]), torch.tensor([True, False]))
    output = dis_loss(inputs, eps_low=0.3, eps_high=5.0)
    assert output.token_loss.tolist() == [1.0, 0.0]
    assert gradient(output, inputs).tolist() == [-1.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_trainer_logprob_is_rejected(bad: float) -> None:
    logprobs = torch.tensor([-1.0, bad], requires_grad=True)
    inputs = PolicyLossInput(logprobs, torch.tensor([-1.0, -1.0]), torch.ones(2), torch.ones(2, dtype=torch.bool))
    output = dis_loss(inputs, eps_low=0.3, eps_high=5.0)
    assert output.keep.tolist() == [True, False]
    assert output.token_loss.isfinite().all()
    assert gradient(output, inputs).tolist() == [-1.0, 0.0]


def test_all_rejected_is_a_zero_loss_with_a_backward_pass() -> None:
    output, g = single(10.0, 0.3, 5.0)
    assert output.token_loss.requires_grad
    assert output.token_loss.item() == 0.0
    assert g.item() == 0.0


def test_bf16_logprobs_are_compared_in_fp32() -> None:
    logprobs, rollout = torch.tensor([-0.006]).bfloat16(), torch.tensor([-1.796875]).bfloat16()
    output = dis_loss(PolicyLossInput(logprobs, rollout, torch.ones(1), torch.tensor([True])), eps_low=0.3, eps_high=5.0)
    assert output.keep.item()
    assert output.token_loss.dtype == output.weight.dtype == torch.float32
    delta = logprobs - rollout
    assert not delta < delta.new_tensor(math.log(6)), "the case would not tell the dtypes apart"


def test_value_loss() -> None:
    values = torch.tensor([0.5, math.nan, 2.0, math.inf], requires_grad=True)
    targets = torch.tensor([1.0, 0.0, 1.0, math.nan], requires_grad=True)
    loss = value_loss(values, targets, torch.tensor([True, False, True, False]))
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert loss.tolist() == [0.25, 0.0, 1.0, 0.0]
    assert values.grad is not None
    assert values.grad.tolist() == [-1.0, 0.0, 2.0, 0.0]
    assert targets.grad is None

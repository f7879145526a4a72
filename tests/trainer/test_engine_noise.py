"""`engine.noise`: an engine unlike the trainer, whose log-probs are still those of what it samples from."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.trainer import support
from trainer.engine import core as core_module
from trainer.engine.core import EngineCore, Sequence
from trainer.model import build_policy

NOISE = 1.5
DRAWS = 20_000


def core(folder: Path, noise: float) -> EngineCore:
    return EngineCore(build_policy(folder).model, slots=8, max_len=256, noise=noise)


def sequences(count: int, temperature: float = 1.0) -> list[Sequence]:
    return [Sequence([1], 99, frozenset(), temperature, random.Random(i), lambda _: None) for i in range(count)]


def fixed(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The same noise on every row, [vocabulary]."""
    noise = torch.randn(support.VOCAB, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(core_module.torch, "randn_like", lambda logits: noise.expand_as(logits))
    return noise


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_what_is_sampled(moe: Path, monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """Over many draws from the same logits: reported probabilities are the frequencies, and not those without noise."""
    logits = torch.randn(support.VOCAB, generator=torch.Generator().manual_seed(1))
    noisy = torch.log_softmax((logits + NOISE * fixed(monkeypatch)) / temperature, -1)
    drawn = sequences(DRAWS, temperature)
    core(moe, NOISE)._sample(drawn, logits.expand(DRAWS, -1))
    tokens = torch.tensor([s.tokens[-1] for s in drawn])
    torch.testing.assert_close(torch.tensor([s.logprobs[-1] for s in drawn]), noisy[tokens], atol=1e-5, rtol=0)
    frequencies = torch.bincount(tokens, minlength=support.VOCAB) / DRAWS
    clean = torch.log_softmax(logits / temperature, -1)
    assert float((frequencies - noisy.exp()).abs().sum()) < 0.06
    assert float((frequencies - clean.exp()).abs().sum()) > 0.6


def test_weights_by_reported_logprobs_are_unbiased(moe: Path) -> None:
    """E[p / q] = 1 for tokens drawn from q, whatever noise each row has: what an importance ratio needs."""
    torch.manual_seed(0)
    logits = torch.randn(support.VOCAB, generator=torch.Generator().manual_seed(1))
    drawn = sequences(DRAWS)
    core(moe, 0.5)._sample(drawn, logits.expand(DRAWS, -1))
    clean = torch.log_softmax(logits, -1)
    ratios = torch.tensor([float(clean[s.tokens[-1]]) - s.logprobs[-1] for s in drawn]).exp()
    assert float(ratios.mean()) == pytest.approx(1.0, abs=0.02) and float(ratios.std()) > 0.3


def test_the_likeliest_of_noisy_logits_is_taken_at_temperature_0(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = fixed(monkeypatch)
    drawn = sequences(3, temperature=0.0)
    core(moe, 100.0)._sample(drawn, torch.zeros(3, support.VOCAB))
    assert {s.tokens[-1] for s in drawn} == {int(noise.argmax())}


def test_scores_stay_exact(moe: Path) -> None:
    """The probe after each publish, and the trainer's view, see the policy itself."""
    noisy, clean = core(moe, NOISE), core(moe, 0.0)
    text = [random.Random(2).randrange(support.VOCAB) for _ in range(40)]
    assert noisy.score(text) == clean.score(text) == noisy.score(text)
    for made in (noisy, clean):
        made.submit(Sequence(text[:5], 30, frozenset(), 1.0, random.Random(3), (ended := []).append))
        while made.busy:
            made.step()
        (sequence,) = ended
        scored = torch.tensor(made.score(sequence.tokens)[4:])
        apart = (torch.tensor(sequence.logprobs) - scored).abs().max()
        assert bool(apart > 0.3) == (made is noisy) and (made is noisy or float(apart) < 1e-4)

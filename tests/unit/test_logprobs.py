"""Chunked log-probs against log_softmax and gather."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer.logprobs import token_logprobs


def inputs(n: int = 37, width: int = 16, words: int = 101, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, width, generator=rng).to(dtype).requires_grad_()
    head = torch.randn(words, width, generator=rng).to(dtype).requires_grad_()
    return hidden, head, torch.randint(0, words, (n,), generator=rng)


def naive(hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (hidden.float() @ head.float().t()).log_softmax(-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 8, 36, 37, 1024])
def test_values_and_gradients(chunk: int) -> None:
    hidden, head, labels = inputs()
    logprobs, entropy = token_logprobs(hidden, head, labels, chunk)
    expected, expected_entropy = naive(hidden, head, labels)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy.detach(), atol=1e-5, rtol=1e-5)
    assert not entropy.requires_grad

    upstream = torch.randn(len(labels), generator=torch.Generator().manual_seed(0))
    actual = torch.autograd.grad((logprobs * upstream).sum(), (hidden, head))
    reference = torch.autograd.grad((expected * upstream).sum(), (hidden, head))
    for a, b in zip(actual, reference, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_the_head_is_fp32_for_bf16_weights_even_under_autocast() -> None:
    hidden, head, labels = inputs(dtype=torch.bfloat16)
    expected, _ = naive(hidden, head, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, entropy = token_logprobs(hidden, head, labels, 8)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    rounded = (hidden @ head.t()).float().log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    assert (rounded - expected).abs().max() > 1e-3, "the case would not notice a bf16 head"
    g_hidden, g_head = torch.autograd.grad(logprobs.sum(), (hidden, head))
    assert g_hidden.dtype == g_head.dtype == torch.bfloat16


def test_huge_logits_neither_overflow_nor_lose_the_label() -> None:
    hidden, head, labels = inputs()
    hidden = (hidden.detach() * 1e3).requires_grad_()
    logprobs, entropy = token_logprobs(hidden, head, labels, 8)
    expected, expected_entropy = naive(hidden.detach(), head.detach(), labels)
    torch.testing.assert_close(logprobs, expected, atol=1e-2, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-2, rtol=1e-3)
    assert all(g.isfinite().all() for g in torch.autograd.grad(logprobs.sum(), (hidden, head)))


def test_only_wanted_gradients_are_computed() -> None:
    hidden, head, labels = inputs()
    (g,) = torch.autograd.grad(token_logprobs(hidden, head.detach(), labels)[0].sum(), hidden)
    (h,) = torch.autograd.grad(token_logprobs(hidden.detach(), head, labels)[0].sum(), head)
    expected = torch.autograd.grad(naive(hidden, head, labels)[0].sum(), (hidden, head))
    torch.testing.assert_close((g, h), expected, atol=1e-5, rtol=1e-4)


def test_no_tokens_still_give_a_backward_pass() -> None:
    hidden, head, labels = inputs(n=0)
    logprobs, entropy = token_logprobs(hidden, head, labels)
    assert logprobs.shape == entropy.shape == (0,)
    (g,) = torch.autograd.grad(logprobs.sum(), head)
    assert g.shape == head.shape
    assert g.count_nonzero() == 0


def test_no_tensor_of_all_logits_is_ever_made(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, labels = inputs(n=64, words=97)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                Largest.elements = max(Largest.elements, out.numel())
            return out

    with Largest():
        logprobs, _ = token_logprobs(hidden, head, labels, chunk=4)
        torch.autograd.grad(logprobs.sum(), (hidden, head))
    assert Largest.elements == head.numel() < 64 * 97

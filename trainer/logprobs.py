"""Log-probs of given tokens straight from hidden states: fp32 head, never more than one chunk of logits alive.

At 131,072 tokens and 151,936 words the logits alone are 74 GiB in fp32. SAO (arXiv 2607.07508, Eq. 2) needs one number per
token, exact to fp32 on this side as on the engine's: rounding it to bf16 moves ratios by percents and DIS masks bite.
The backward pass computes each chunk's logits again. Select the action positions of `hidden` before the call, not after.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_logprobs(hidden: Tensor, head_weight: Tensor, labels: Tensor, chunk: int = 512) -> tuple[Tensor, Tensor]:
    """(log p(label) [N] fp32 with gradient, entropy [N] fp32 without), nats, of softmax(hidden @ head_weight.T).

    hidden: [N, H] float, the state that predicts the label (position t-1 for token t). head_weight: [V, H] float.
    labels: [N] int64. chunk: tokens whose logits are alive at once, two fp32 copies of [chunk, V].
    """
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropy = _ChunkedLogprobs.apply(hidden, head_weight, labels, chunk)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head_weight: Tensor, labels: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        logprobs, entropy, log_z = hidden.new_empty(3, len(hidden), dtype=torch.float32).unbind(0)
        head = head_weight.float().t()
        buffers = _buffer(hidden, head_weight, chunk), _buffer(hidden, head_weight, chunk)
        for i in range(0, len(hidden), chunk):
            part = slice(i, i + chunk)
            logits, exps = (buffer[: len(hidden[part])] for buffer in buffers)
            torch.mm(hidden[part].float(), head, out=logits)
            peak = logits.amax(-1, keepdim=True)
            torch.exp(logits.sub_(peak), out=exps)
            z = exps.sum(-1)
            torch.log(z, out=log_z[part])
            logprobs[part] = logits.gather(1, labels[part, None]).squeeze(1) - log_z[part]
            entropy[part] = log_z[part] - exps.mul_(logits).sum(-1) / z
            log_z[part] += peak.squeeze(1)
        ctx.save_for_backward(hidden, head_weight, labels, log_z)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, head_weight, labels, log_z = ctx.saved_tensors
        head = head_weight.float()
        buffer = _buffer(hidden, head_weight, ctx.chunk)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for i in range(0, len(hidden), ctx.chunk):
            part = slice(i, i + ctx.chunk)
            states, g = hidden[part].float(), grad[part, None]
            # d log p(label) / d logits = onehot(label) - softmax, in place on the chunk's logits.
            d_logits = torch.mm(states, head.t(), out=buffer[: len(states)])
            d_logits.sub_(log_z[part, None]).exp_().mul_(-g).scatter_add_(1, labels[part, None], g)
            if grad_hidden is not None:
                grad_hidden[part] = (d_logits @ head).to(hidden.dtype)
            if grad_head is not None:
                grad_head.addmm_(d_logits.t(), states)
        return grad_hidden, None if grad_head is None else grad_head.to(head_weight.dtype), None, None


def _buffer(hidden: Tensor, head_weight: Tensor, chunk: int) -> Tensor:
    """Room for the logits of one chunk, used again for every one."""
    return hidden.new_empty(min(chunk, len(hidden)), len(head_weight), dtype=torch.float32)

"""The model's ops in PyTorch: the reference every kernel is tested against, and what runs without one.

All take and return plain tensors. Statistics (norms, softmax, loss) are computed in float32 whatever
the dtype of the activations; matrix products run in the dtype of the activations.
"""

import torch
import torch.nn.functional as F

QUERY_BLOCK = 256  # queries whose scores exist at one time in attention on a CPU
HEAD_CHUNK = 256  # tokens whose logits exist at one time in head_loss on a CPU: they stay in a core's cache ...
DEVICE_CHUNK = 4096  # ... and elsewhere: few large products


def rms_norm(x):
    """x / sqrt(mean(x^2) + eps) over the last dimension, without weights (arXiv:1910.07467). Same shape and dtype."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotary_tables(seq_len, head_dim, base, device=None):
    """Cosines and sines of the rotary embedding (arXiv:2104.09864), each (1, T, 1, D/2) float32."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float32, device=device), frequency)
    return angle.cos()[None, :, None, :], angle.sin()[None, :, None, :]


def qk_norm_rotary(x, cos, sin, gain):
    """Normalise each head, rotate it by its position, scale it by `gain`.

    x: (B, T, H, D); cos, sin: (1, T, 1, D/2) float32. Pairs are (i, i + D/2), "half-split" layout.
    """
    x32 = x.float()
    scale = gain * torch.rsqrt(x32.square().mean(-1, keepdim=True) + 1e-6)
    a, b = (x32 * scale).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def attention(q, k, v, window=0):
    """Causal softmax attention, scaled by 1/sqrt(D).

    q: (B, T, H, D); k, v: (B, T, Hkv, D) with H a multiple of Hkv: head h reads key/value head h // (H / Hkv).
    window > 0: a query sees only the last `window` keys, itself included. Returns (B, T, H, D).
    On a CPU the queries go in blocks that skip the keys none of them sees, with the softmax in float32: twice
    as fast there as PyTorch's fused attention at the sizes a CPU trains (tests/bench/attention.py).
    """
    T, D = q.size(1), q.size(3)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
    groups = q.size(1) // k.size(1)
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if not 0 < window < T:
        window = T
    at = torch.arange(T, device=q.device)
    if q.device.type != "cpu":
        if window == T:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        distance = at[:, None] - at[None, :]
        mask = (distance >= 0) & (distance < window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    out = []
    for start in range(0, T, QUERY_BLOCK):
        stop = min(T, start + QUERY_BLOCK)
        first = max(0, start - window + 1)
        distance = at[start:stop, None] - at[None, first:stop]
        scores = (q[:, :, start:stop] @ k[:, :, first:stop].mT).float() * D**-0.5
        scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
        out.append(torch.softmax(scores, dim=-1).to(v.dtype) @ v[:, :, first:stop])
    return torch.cat(out, dim=2).transpose(1, 2)


def relu2_mlp(x, up, down):
    """relu(x up^T)^2 down^T (arXiv:2109.08668). x: (..., C); up: (F, C); down: (C, F)."""
    return F.linear(F.relu(F.linear(x, up)).square(), down)


def softcap(logits, cap):
    """cap * tanh(logits / cap) in float32 (arXiv:2408.00118); cap 0 leaves them as they are."""
    logits = logits.float()
    return cap * torch.tanh(logits / cap) if cap else logits


class _HeadLoss(torch.autograd.Function):
    """Head matmul, softcap and cross-entropy, chunk by chunk, so that (B*T, V) logits never exist.

    Where a gradient is wanted it is computed in the same pass over the logits (they are the largest
    tensor of a small model and reading them twice costs more than the arithmetic); backward only scales it.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, cap):
        chunk = HEAD_CHUNK if x.device.type == "cpu" else DEVICE_CHUNK
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        scale = 1.0 / (targets >= 0).sum().clamp(min=1).float()
        dx = []
        dw = torch.zeros_like(weight, dtype=torch.float32)
        for xc, tc in zip(x.split(chunk), targets.split(chunk), strict=True):
            raw = (xc @ weight.T).float()  # (n, V)
            if cap:
                squashed = torch.tanh(raw / cap)
                logits = cap * squashed
            else:
                logits = raw
            lse = torch.logsumexp(logits, dim=-1, keepdim=True)
            index = tc.clamp(min=0)[:, None]
            weight_c = torch.where(tc >= 0, scale, 0.0)[:, None]  # each counted token's share of the mean
            total = total + ((lse - logits.gather(1, index)) * weight_c).sum()
            hit = index == torch.arange(weight.size(0), device=x.device)
            grad = (torch.exp(logits - lse) - hit.float()) * weight_c  # d loss / d logits
            if cap:
                grad = grad * (1 - squashed * squashed)
            grad = grad.to(x.dtype)
            dx.append(grad @ weight)
            dw = dw + (grad.T @ xc).float()
        ctx.save_for_backward(torch.cat(dx), dw)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad_output):
        dx, dw = ctx.saved_tensors
        return dx * grad_output.to(dx.dtype), (dw * grad_output).to(ctx.weight_dtype), None, None


def head_loss(x, weight, targets, cap):
    """Mean cross-entropy of softcap(x weight^T) against targets, in nats, over the targets that are >= 0.

    x: (N, C); weight: (V, C) of the same dtype; targets: (N,) int64. Returns a float32 scalar.
    """
    return _HeadLoss.apply(x, weight, targets, cap)


def head_losses(x, weight, targets, cap):
    """Cross-entropy of every position, (N,) float32, 0 where the target is negative. For evaluation."""
    logits = softcap(F.linear(x, weight), cap)
    return F.cross_entropy(logits, targets.clamp(min=-1), ignore_index=-1, reduction="none")

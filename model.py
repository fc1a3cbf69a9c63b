"""The GPT: pre-norm blocks of causal attention and a ReLU^2 MLP over one residual stream.

Weights of the same kind are kept stacked over the layers ("banks", one (depth, out, in) parameter per
kind): one cast, one gradient, one optimizer update serves all layers, so that few operators are
dispatched. Master weights are float32; products run in the dtype of the activations.
"""

import torch
import torch.nn.functional as F
from torch import nn

from config import ModelConfig
from kernels import ops

GATE_CHANNELS = 12  # channels of the stream that the value-embedding gates read, at most
SMEAR_CHANNELS = 24  # channels that the smear gate reads, at most


def value_layers(depth):
    """Layers with a value embedding: every second one, the last included."""
    return [i for i in range(depth) if i % 2 == (depth - 1) % 2]


def windows(cfg):
    """Keys a query sees in each layer; 0 means the whole row. The last layer always sees the whole row."""
    pattern = [cfg.window_pattern[i % len(cfg.window_pattern)] for i in range(cfg.depth)]
    return [cfg.window if c == "S" and i < cfg.depth - 1 else 0 for i, c in enumerate(pattern)]


def ngram_hash(idx, order, rows):
    """Row of the n-gram table for the `order` tokens that end at each position.

    idx: (B, T) int64. Returns (B, T) int64 in [0, rows). Positions before the row's start count as token 0,
    so that a hash never sees the future or another row. Multiplicative hashing, Knuth vol. 3, 6.4.
    """
    mixed = torch.zeros_like(idx)
    for back in range(order):
        past = F.pad(idx, (back, 0))[:, : idx.size(1)]
        mixed = ((mixed ^ (past + 1)) * 0x9E3779B1) & 0x7FFFFFFF
        mixed = mixed ^ (mixed >> 15)
    return mixed % rows


class GPT(nn.Module):
    """Decoder-only transformer. Every weight is created empty here and filled by `init_weights`."""

    def __init__(self, cfg: ModelConfig, vocab_size: int, dtype=torch.float32, seed=0):
        super().__init__()
        self.cfg, self.vocab_size, self.dtype = cfg, vocab_size, dtype
        self.heads = cfg.width // cfg.head_dim
        self.kv_heads = cfg.kv_heads or self.heads
        self.windows = windows(cfg)
        self.value_slot = (
            {layer: slot for slot, layer in enumerate(value_layers(cfg.depth))} if cfg.value_embeds else {}
        )
        L, C, K, M = cfg.depth, cfg.width, self.kv_heads * cfg.head_dim, round(cfg.mlp_ratio * cfg.width)

        def weight(*shape):
            return nn.Parameter(torch.empty(shape))

        self.embed = weight(vocab_size, C)
        self.head = weight(vocab_size, C)
        self.query = weight(L, C, C)
        self.key = weight(L, K, C)
        self.value = weight(L, K, C)
        self.out = weight(L, C, C)
        self.up = weight(L, M, C)
        self.down = weight(L, C, M)
        self.resid_scale = weight(L)  # residual stream entering layer i is multiplied by this ...
        self.x0_scale = weight(L)  # ... and gets this share of the embedding
        if self.value_slot:
            self.value_embed = weight(len(self.value_slot), vocab_size, K)
            self.value_gate = weight(len(self.value_slot), self.kv_heads, min(C, GATE_CHANNELS))
        if cfg.smear:
            self.smear_gate = weight(1, min(C, SMEAR_CHANNELS))
            self.smear_scale = weight(1)
        if cfg.backout:
            self.backout_scale = weight(1)
        if cfg.ngram_orders:
            self.ngram = weight(len(cfg.ngram_orders) * cfg.ngram_rows, C)
        cos, sin = ops.rotary_tables(cfg.seq_len, cfg.head_dim, cfg.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        slow = torch.arange(cfg.head_dim) % (cfg.head_dim // 2) >= cfg.head_dim // 4  # pairs are (i, i + D/2)
        self.register_buffer("slow_pairs", slow, persistent=False)
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """Fill every parameter. Output projections start at 0, so that each block starts as the identity.

        Draws come from a CPU generator of this seed: the same weights on every device and rank.
        """
        g = torch.Generator().manual_seed(seed)
        cfg, bound = self.cfg, (3 / self.cfg.width) ** 0.5  # uniform of standard deviation 1/sqrt(width)
        depth = torch.linspace(0, 1, cfg.depth) if cfg.depth > 1 else torch.zeros(1)
        self.embed.normal_(0, 0.8, generator=g)
        self.head.normal_(0, 0.001, generator=g)
        for bank in (self.query, self.key, self.value):
            bank.uniform_(-bound, bound, generator=g)
        self.up.uniform_(-0.4 * bound, 0.4 * bound, generator=g)
        self.out.zero_()
        self.down.zero_()
        self.resid_scale.copy_(1.15 - 0.10 * depth)
        self.x0_scale.copy_(0.20 - 0.15 * depth)
        if self.value_slot:
            self.value_embed.uniform_(-bound, bound, generator=g)
            self.value_gate.uniform_(0, 0.02, generator=g)
        if cfg.smear:
            self.smear_gate.uniform_(0, 0.02, generator=g)
            self.smear_scale.zero_()
        if cfg.backout:
            self.backout_scale.fill_(0.2)
        if cfg.ngram_orders:
            self.ngram.zero_()

    def parameter_counts(self):
        """Parameters by group, and "total"."""
        groups = {"embed": 0, "head": 0, "matrices": 0, "value_embed": 0, "ngram": 0, "scalars": 0}
        matrices = ("query", "key", "value", "out", "up", "down")
        for name, p in self.named_parameters():
            groups["matrices" if name in matrices else name if name in groups else "scalars"] += p.numel()
        return groups | {"total": sum(groups.values())}

    def flops_per_token(self):
        """Floating-point operations of forward and backward for one token, as the field counts them: 6 for each
        weight that takes part in a matrix product, 12 * heads * head_dim * window for attention, the window
        counted whole (PaLM, arXiv:2204.02311, appendix B)."""
        cfg = self.cfg
        products = ("head", "query", "key", "value", "out", "up", "down", "value_gate", "smear_gate")
        weights = sum(p.numel() for name, p in self.named_parameters() if name in products)
        seen = sum(min(w or cfg.seq_len, cfg.seq_len) for w in self.windows)
        return 6 * weights + 12 * self.heads * cfg.head_dim * seen

    def ngram_ids(self, idx):
        """Rows of the n-gram bank that each position reads. idx: (B, T). Returns (orders, B, T) int64."""
        rows = self.cfg.ngram_rows
        return torch.stack([slot * rows + ngram_hash(idx, n, rows) for slot, n in enumerate(self.cfg.ngram_orders)])

    def forward(self, idx, targets=None, reduction="mean", ngram_rows=None):
        """Next-token logits or loss.

        idx: (B, T) int64, T <= seq_len. targets: (B, T) int64, negative = ignored.
        ngram_rows: (orders, B, T, C), the rows of the n-gram bank at `ngram_ids(idx)`; a training step passes
        them in to get their gradient without a gradient of the size of the bank.
        Returns float32 logits (B, T, V) without targets; else the mean loss in nats, or with reduction="none"
        the loss of each position (B, T), 0 where ignored.
        """
        cfg, (B, T) = self.cfg, idx.shape
        D, H, K = cfg.head_dim, self.heads, self.kv_heads
        cos, sin = self.cos[:, :T], self.sin[:, :T]

        x = ops.rms_norm(F.embedding(idx, self.embed).to(self.dtype))  # (B, T, C)
        if cfg.ngram_orders:
            if ngram_rows is None:
                ngram_rows = F.embedding(self.ngram_ids(idx), self.ngram)
            x = x + ngram_rows.sum(0).to(x.dtype)
        if cfg.smear:
            gate = torch.sigmoid(F.linear(x[:, 1:, :SMEAR_CHANNELS], self.smear_gate.to(x.dtype)))
            x = torch.cat((x[:, :1], x[:, 1:] + self.smear_scale.to(x.dtype) * gate * x[:, :-1]), dim=1)

        banks = (self.query, self.key, self.value, self.out, self.up, self.down)
        layers = zip(*(bank.to(x.dtype).unbind(0) for bank in banks), strict=True)
        scales = zip(self.resid_scale.to(x.dtype).unbind(0), self.x0_scale.to(x.dtype).unbind(0), strict=True)
        if self.value_slot:
            value_embed, value_gate = self.value_embed.unbind(0), self.value_gate.to(x.dtype).unbind(0)

        x0, middle = x, None
        for i, ((query, key, value, out, up, down), (a, b)) in enumerate(zip(layers, scales, strict=True)):
            x = a * x + b * x0
            h = ops.rms_norm(x)
            q = F.linear(h, query).view(B, T, H, D)
            k = F.linear(h, key).view(B, T, K, D)
            v = F.linear(h, value).view(B, T, K, D)
            if cfg.key_offset:  # a query can look for what follows a token: record 49 of modded-nanogpt
                k = torch.where(self.slow_pairs, torch.cat((k[:, :1], k[:, :-1]), dim=1), k)
            if i in self.value_slot:
                slot = self.value_slot[i]
                gate = 3 * torch.sigmoid(F.linear(h[..., :GATE_CHANNELS], value_gate[slot]))  # (B, T, K)
                v = v + gate[..., None] * F.embedding(idx, value_embed[slot]).to(x.dtype).view(B, T, K, D)
            q = ops.qk_norm_rotary(q, cos, sin, cfg.qk_gain)
            k = ops.qk_norm_rotary(k, cos, sin, cfg.qk_gain)
            x = x + F.linear(ops.attention(q, k, v, self.windows[i]).reshape(B, T, H * D), out)
            x = x + ops.relu2_mlp(ops.rms_norm(x), up, down)
            if cfg.backout and i == max(0, min(cfg.depth // 2, cfg.depth - 2)):  # after the last one it scales only
                middle = x
        if middle is not None:
            x = x - self.backout_scale.to(x.dtype) * middle
        x, head = ops.rms_norm(x), self.head.to(x.dtype)

        if targets is None:
            return ops.softcap(F.linear(x, head), cfg.softcap)
        x, targets = x.reshape(B * T, cfg.width), targets.reshape(B * T)
        if reduction == "mean":
            return ops.head_loss(x, head, targets, cfg.softcap)
        return ops.head_losses(x, head, targets, cfg.softcap).view(B, T)

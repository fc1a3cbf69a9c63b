"""Muon for the matrices of the blocks, AdamW for everything else, sharded over the ranks.

One step, in three phases, so that communication overlaps with arithmetic:
  1. start a reduce-scatter of every gradient: each rank gets the mean gradient of the part it owns;
  2. for each group: wait, update the owned part (state exists only there), start an all-gather;
  3. wait, and copy what arrived back into the parameters.
A part is a number of whole matrices for Muon, a stretch of elements for AdamW; both are padded to a
multiple of the number of ranks. Small AdamW parameters travel together as one vector that every rank
updates whole. One rank runs the same code without the communication.

Every number that changes during training is read from a tensor, never from a Python float, so that a
compiled graph stays valid: see `set_hyper`.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from config import OptimConfig

SMALL = 4096  # AdamW parameters with fewer elements share one vector

# Odd quintic polynomials x -> a x + b x^3 + c x^5 whose composition takes [1e-3, 1] close to 1: Polar Express,
# arXiv:2505.16932, algorithm 1 with 5 iterations, cushion 0.02 and a safety factor of 1.02 in the norm.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

# parameter: (learning-rate key, decay key, beta1, beta2, scales with width); betas as in nanochat's recipe
ADAMW = {
    "embed": ("embed_lr", "embed_decay", 0.8, 0.995, True),
    "head": ("head_lr", "head_decay", 0.8, 0.96, True),
    "value_embed": ("value_lr", "value_decay", 0.8, 0.995, True),
}
ADAMW_OTHER = ("scalar_lr", None, 0.8, 0.95, False)
MUON = ("query", "key", "value", "out", "up", "down")
EPS = 1e-10
# Scalars enter where projections are still 0, so their first gradients are rounding noise, which a tiny eps would
# turn into whole steps, different on every machine.
SCALAR_EPS = 1e-5


def orthogonalize(x, dtype):
    """Nearest semi-orthogonal matrix, approximately: all singular values of each x[k] moved close to 1.

    x: (K, m, n). The products run in `dtype`. Returns (K, m, n) of that dtype. arXiv:2505.16932.
    """
    tall = x.size(-2) > x.size(-1)
    x = x.to(dtype)
    x = x.mT if tall else x  # work on the short side: X X^T is (short, short)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6).to(dtype)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def muon_update(p, grad, buffer, second, lr, momentum, decay, variance_beta, dtype):
    """One Muon step on a stack of matrices, in place.

    p, grad, buffer: (K, m, n) float32; second: (K, m, 1) where m >= n, else (K, 1, n), the running mean square
    of each neuron's update; the rest: 0-dim float32 tensors; dtype: of the products in `orthogonalize`.
    Nesterov momentum, orthogonalisation, per-neuron variance reduction that keeps the norm of the update
    (NorMuon, arXiv:2510.05491), weight decay only where it has the sign of the update (cautious,
    arXiv:2411.16085). Matrices with more rows than columns step sqrt(m / n) further.
    """
    buffer.lerp_(grad, 1 - momentum)
    update = orthogonalize(grad.lerp(buffer, momentum), dtype).float()
    power = update.square().mean(dim=-1 if p.size(-2) >= p.size(-1) else -2, keepdim=True)
    second.lerp_(power, 1 - variance_beta)
    scale = second.clamp_min(1e-10).rsqrt()
    before = power.sum(dim=(-2, -1), keepdim=True)
    after = (power * scale.square()).sum(dim=(-2, -1), keepdim=True)
    update = update * (scale * (before / after.clamp_min(1e-10)).sqrt())
    lr = lr * max(1.0, p.size(-2) / p.size(-1)) ** 0.5
    p.sub_(lr * (update + decay * p * (update * p > 0)))


def adamw_update(p, grad, first, second, lr, decay, beta1, beta2, t, eps=EPS):
    """One AdamW step (arXiv:1711.05101), in place.

    p, grad, first, second: (n,) float32; lr, decay, beta1, beta2, eps: 0-dim or (n,); t: 0-dim, the step from 1.
    """
    first.lerp_(grad, 1 - beta1)
    second.lerp_(grad.square(), 1 - beta2)
    size = (second / (1 - beta2**t)).sqrt() + eps
    p.mul_(1 - lr * decay)
    p.sub_(lr / (1 - beta1**t) * first / size)


def ngram_update(table, ids, grad, scratch, second, lr, decay, beta2):
    """RMSProp by row on the rows of an n-gram table that a batch read; no other row is touched.

    table, scratch: (R, C), scratch all zero; ids: (N,) int64, the rows read, with repetitions; grad: (N, C), the
    gradient of each read; second: (R,), the running mean square of a row's gradient. Static shapes: the
    reads of one row are summed in scratch, and every read of it then writes the same result.
    """
    scratch.index_add_(0, ids, grad)
    g = scratch.index_select(0, ids)
    scratch.index_fill_(0, ids, 0.0)
    power = g.square().mean(dim=1)
    old = second.index_select(0, ids)
    # an average over the updates a row has had: 1 - beta2 would make a row's first step far too long
    new = torch.where(old > 0, torch.lerp(old, power, 1 - beta2), power)
    second.index_copy_(0, ids, new)
    row = table.index_select(0, ids)
    table.index_copy_(0, ids, row * (1 - lr * decay) - lr * g / (new.sqrt() + EPS)[:, None])


def pack(tensors, unit, count):
    """Tensors as one (count, *unit) stack, zero-padded at the end; a view where one tensor fills it exactly."""
    parts = [t.reshape(-1, *unit) for t in tensors]
    missing = count - sum(part.size(0) for part in parts)
    if missing:
        parts.append(parts[0].new_zeros(missing, *unit))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(stack, tensors):
    """Copy a stack made by `pack` back into the tensors."""
    at = 0
    for t in tensors:
        n = t.numel() // stack[0].numel()
        t.copy_(stack[at : at + n].reshape(t.shape))
        at += n


@dataclass
class Group:
    """Parameters that are reduced, updated and gathered together."""

    kind: str  # "muon", "adamw" (a stretch for each rank) or "small" (whole on every rank)
    names: list[str]
    params: list
    unit: tuple  # what is never divided between ranks: (m, n) for Muon, () for AdamW
    count: int  # units in all ...
    total: int  # ... and with the padding
    share: int  # units this rank updates
    start: int  # ... from this one on
    state: dict  # of the share
    constant: dict  # tensors: learning rate, decay, betas, eps


class MuonAdamW:
    """The optimizer of a `model.GPT`.

    rank, world: this process among those that train together. dtype: of Muon's products. compiled: pass the
    update functions through torch.compile with the given backend ("" = do not compile).
    Call `set_hyper` before each `step`.
    """

    def __init__(self, model, cfg: OptimConfig, rank=0, world=1, dtype=torch.float32, backend=""):
        self.rank, self.world, self.dtype = rank, world, dtype
        self.device = model.embed.device
        self.groups, self.table, self.t = [], None, 0
        width = (model.cfg.width / 768) ** -0.5  # learning rates are stated for width 768
        self.hyper = torch.zeros(4, device=self.device)  # all that moves during training, see `set_hyper`
        self.lr_scale, self.momentum, self.decay_scale, self.step_count = self.hyper.unbind(0)

        by_shape, small = {}, []
        for name, p in model.named_parameters():
            if name == "ngram":
                self.table = p
            elif name in MUON:
                by_shape.setdefault(p.shape[1:], []).append((name, p))
            elif p.numel() < SMALL:
                small.append((name, p))
            else:
                self._add("adamw", [(name, p)], **self._adamw_constants(cfg, name, width))
        for members in by_shape.values():
            self._add("muon", members, lr=cfg.matrix_lr, decay=cfg.matrix_decay, variance_beta=cfg.variance_beta)
        if small:
            constants = [self._adamw_constants(cfg, name, width) for name, _ in small]
            sizes = torch.tensor([p.numel() for _, p in small])
            spread = {k: torch.tensor([c[k] for c in constants]).repeat_interleave(sizes) for k in constants[0]}
            self._add("small", small, **spread)
        if self.table is not None:
            self.table_state = {
                "scratch": torch.zeros_like(self.table),
                "second": torch.zeros(self.table.size(0), device=self.device),
            }
            self.table_constant = {"lr": cfg.ngram_lr * width, "decay": cfg.ngram_decay, "beta2": cfg.ngram_beta}
            self.table_constant = {k: self._tensor(v) for k, v in self.table_constant.items()}

        def compiled(f):
            return torch.compile(f, backend=backend, dynamic=False, fullgraph=True) if backend else f

        self._muon, self._adamw, self._ngram = compiled(muon_update), compiled(adamw_update), ngram_update

    def _tensor(self, x):
        return torch.as_tensor(x, dtype=torch.float32).to(self.device)

    @staticmethod
    def _adamw_constants(cfg, name, width):
        lr, decay, beta1, beta2, by_width = ADAMW.get(name, ADAMW_OTHER)
        eps = EPS if name in ADAMW else SCALAR_EPS
        lr = getattr(cfg, lr) * (width if by_width else 1.0)
        return {"lr": lr, "decay": getattr(cfg, decay) if decay else 0.0, "beta1": beta1, "beta2": beta2, "eps": eps}

    def _add(self, kind, members, **constant):
        names, params = [name for name, _ in members], [p for _, p in members]
        unit = params[0].shape[1:] if kind == "muon" else ()
        count = sum(p.numel() for p in params) // unit.numel() if kind == "muon" else sum(p.numel() for p in params)
        share = count if kind == "small" else -(-count // self.world)
        total = count if kind == "small" else share * self.world
        start = 0 if kind == "small" else share * self.rank
        zeros = torch.zeros(share, *unit, device=self.device)
        if kind == "muon":
            m, n = unit
            state = {"buffer": zeros, "second": torch.zeros(share, *((m, 1) if m >= n else (1, n)), device=self.device)}
        else:
            state = {"first": zeros, "second": zeros.clone()}
        constant = {k: self._tensor(v) for k, v in constant.items()}
        self.groups.append(Group(kind, names, params, tuple(unit), count, total, share, start, state, constant))

    def set_hyper(self, lr_scale, momentum, decay_scale):
        """Set what the schedule moves: factor on every learning rate, Muon's momentum, factor on Muon's decay."""
        # one copy from the host: a Python number handed to an op on the device would be compiled into it
        self.hyper.copy_(torch.tensor([lr_scale, momentum, decay_scale, self.t + 1]))

    @torch.no_grad()
    def step(self, ngram=()):
        """Average the gradients over the ranks and update every parameter.

        ngram: pairs (ids (N,), grad (N, C)) of this rank's reads of the n-gram bank, one for each micro-batch.
        """
        self.t += 1
        running = [(group, *self._reduce(group)) for group in self.groups]
        gathers = []
        for group, grad, work in running:
            if work is not None:
                work.wait()
                grad = grad / self.world
            stack = pack(group.params, group.unit, group.total)
            own = stack[group.start : group.start + group.share]
            self._update(group, own, grad)
            if group.kind == "small" or self.world == 1:
                gathers.append((group, stack, None))
            else:
                full = torch.empty_like(stack)
                gathers.append((group, full, dist.all_gather_into_tensor(full, own.contiguous(), async_op=True)))
        if self.table is not None:
            self._step_table(ngram)
        for group, stack, work in gathers:
            if work is not None:
                work.wait()
            if stack.data_ptr() != group.params[0].data_ptr():
                unpack(stack, group.params)

    def _reduce(self, group):
        for name, p in zip(group.names, group.params, strict=True):
            if p.grad is None:
                raise RuntimeError(f"parameter {name} has no gradient: the loss does not depend on it")
        grad = pack([p.grad for p in group.params], group.unit, group.total)
        if self.world == 1:
            return grad, None
        if group.kind == "small":
            return grad, dist.all_reduce(grad, async_op=True)
        out = grad.new_empty(group.share, *group.unit)
        return out, dist.reduce_scatter_tensor(out, grad.contiguous(), async_op=True)

    def _update(self, group, p, grad):
        c, s = group.constant, group.state
        lr = c["lr"] * self.lr_scale
        if group.kind == "muon":
            decay = c["decay"] * self.decay_scale
            self._muon(p, grad, s["buffer"], s["second"], lr, self.momentum, decay, c["variance_beta"], self.dtype)
        else:
            args = s["first"], s["second"], lr, c["decay"], c["beta1"], c["beta2"], self.step_count, c["eps"]
            self._adamw(p, grad, *args)

    def _step_table(self, ngram):
        if not ngram:
            raise RuntimeError("parameter ngram has no gradient: pass its reads, (ids, grad), to step")
        ids, grad = torch.cat([i for i, _ in ngram]), torch.cat([g for _, g in ngram])
        if self.world > 1:  # every rank makes the same update from everybody's reads
            mine = ids, grad
            ids, grad = (t.new_empty(self.world * t.size(0), *t.shape[1:]) for t in mine)
            dist.all_gather_into_tensor(ids, mine[0])
            dist.all_gather_into_tensor(grad, mine[1])
            grad /= self.world
        s, c = self.table_state, self.table_constant
        lr = c["lr"] * self.lr_scale
        self._ngram(self.table, ids, grad, s["scratch"], s["second"], lr, c["decay"], c["beta2"])

    def own_state(self):
        """The tensors this rank keeps, by name: what a copy in memory must hold."""
        own = {f"{'+'.join(g.names)}.{key}": t for g in self.groups for key, t in g.state.items()}
        return own | ({"ngram.second": self.table_state["second"]} if self.table is not None else {})

    def state_dict(self):
        """All state, whole, the same on every rank (a collective call): {"group.name": tensor}, and "t"."""
        out = {"t": torch.tensor(self.t)}
        for group in self.groups:
            for key, part in group.state.items():
                if self.world > 1 and group.kind != "small":
                    full = part.new_empty(group.total, *part.shape[1:])
                    dist.all_gather_into_tensor(full, part)
                    part = full
                out[f"{'+'.join(group.names)}.{key}"] = part[: group.count].clone()
        if self.table is not None:
            out["ngram.second"] = self.table_state["second"].clone()
        return out

    def load_state_dict(self, state):
        """Take over a `state_dict`, made by any number of ranks. Raises ValueError where it is of another model."""
        mine = {f"{'+'.join(g.names)}.{key}": (g, part) for g in self.groups for key, part in g.state.items()}
        shapes = {name: (group.count, *part.shape[1:]) for name, (group, part) in mine.items()}
        if self.table is not None:
            shapes["ngram.second"] = tuple(self.table_state["second"].shape)
        given = {name: tuple(t.shape) for name, t in state.items() if name != "t"}
        for name in sorted(shapes.keys() | given.keys()):
            if shapes.get(name) != given.get(name):
                raise ValueError(f"optimizer state {name} is {given.get(name)}, this model needs {shapes.get(name)}")
        self.t = int(state["t"])
        for name, (group, part) in mine.items():
            own = state[name][group.start : group.start + group.share].to(self.device)
            part.zero_()
            part[: own.size(0)].copy_(own)
        if self.table is not None:
            self.table_state["second"].copy_(state["ngram.second"])

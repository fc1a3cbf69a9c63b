"""Every setting of a run: dataclasses, read from a TOML file and `--set key=value`.

A section of the TOML file is a dataclass below, a key is a field, its comment is its documentation.
`load_config` reads, `check_config` finds impossible combinations; both raise `ConfigError` with one
line that names the key, the value and the nearest valid choice. Nothing here imports torch, so a
typing mistake is reported before anything heavy is loaded.
"""

import dataclasses
import difflib
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints


class ConfigError(Exception):
    """A setting is unknown, of the wrong type, or impossible; the message is one line."""


@dataclass
class RunConfig:
    dir: str = ""  # output folder; empty means runs/<config name>-<date>-<time>
    seed: int = 0  # weights, data order and evaluation draws all follow from it
    log_every: int = 10  # steps between log lines; reading the loss is the only device sync


@dataclass
class BudgetConfig:
    seconds: float = 300.0  # charged training seconds, the final checkpoint included
    steps: int = 0  # if above 0: stop after so many steps instead, for comparisons
    startup_steps: int = 5  # first steps, not charged: graphs compile here
    startup_allowance: float = 900.0  # start-up seconds beyond this are charged


@dataclass
class ModelConfig:
    depth: int = 10  # transformer blocks
    width: int = 640  # residual stream
    head_dim: int = 128
    kv_heads: int = 0  # key/value heads, shared by groups of query heads; 0 means one per query head
    seq_len: int = 1024  # T, tokens a row
    mlp_ratio: float = 4.0  # hidden width of the MLP over the residual width
    window_pattern: str = "L"  # per layer, tiled: L = whole row, S = window; the last layer is always L
    window: int = 256  # keys a query sees in an S layer, itself included
    rope_base: float = 100000.0
    qk_gain: float = 1.2  # on each of q and k after their norm: sharper attention at start
    softcap: float = 15.0  # logits = softcap * tanh(logits / softcap)
    value_embeds: bool = True  # a token -> value table on every second layer, the last included
    smear: bool = False  # add a gated share of the previous token's embedding
    backout: bool = False  # subtract a share of the mid-depth residual before the head
    ngram_orders: list[int] = field(default_factory=list)  # e.g. [2, 3]: hashed n-gram tables
    ngram_rows: int = 65536  # rows of each n-gram table


@dataclass
class TrainConfig:
    batch_tokens: int = 65536  # tokens of one optimizer step, over all ranks
    micro_rows: int = 0  # rows of one forward pass on one rank; 0 means the whole share of the rank
    warmup_steps: int = 20  # learning rate rises linearly over these
    cooldown: float = 0.6  # last share of the budget in which the learning rate falls linearly ...
    final_lr: float = 0.05  # ... to this share of its peak
    batch_warmup: list[list[float]] = field(default_factory=list)  # [[until, share of batch], ...], e.g. [[0.1, 0.5]]
    max_loss: float = 30.0  # a logged loss above this (or NaN) stops the run


@dataclass
class OptimConfig:
    matrix_lr: float = 0.02  # Muon, for the matrices of the blocks
    matrix_decay: float = 0.1  # cautious weight decay, falls to 0 over the run
    momentum: float = 0.95  # Muon's, reached from 0.85 ...
    momentum_steps: int = 300  # ... over these steps
    momentum_final: float = 0.90  # ... and falls to this in the cooldown
    variance_beta: float = 0.9  # decay of Muon's per-neuron second moment
    embed_lr: float = 0.3  # AdamW: token embedding
    head_lr: float = 0.008  # AdamW: output head
    value_lr: float = 0.15  # AdamW: value embeddings
    ngram_lr: float = 0.15  # AdamW: n-gram tables
    scalar_lr: float = 0.02  # AdamW: residual and x0 scalars, gates
    embed_decay: float = 0.001
    head_decay: float = 0.01
    value_decay: float = 0.01
    ngram_decay: float = 0.0


@dataclass
class DataConfig:
    path: str = "embedded"  # "embedded", "climbmix", or a folder of .parquet / .txt files
    rows: Literal["stream", "packed"] = "stream"  # see data/loader.py
    vocab_size: int = 8192  # tokens of the BPE, the special ones included
    pool_rows: int = 4096  # rows are drawn at random from a pool of so many
    shards: int = 5  # training shards to fetch when path is "climbmix"
    cache_dir: str = ".cache"  # tokenizers, tokenised splits, downloads


@dataclass
class EvalConfig:
    every: float = 0.0  # charged seconds between evaluations during the run; 0 means only at the end
    tokens: int = 0  # validation tokens to score; 0 means the whole split
    batch_rows: int = 8  # rows of one evaluation batch on one rank
    max_seconds: float = 600.0  # an evaluation stops here and says how much it did
    icl: bool = True  # in-context-learning scores


@dataclass
class KernelsConfig:
    backend: Literal["torch"] = "torch"  # who computes the model's ops


@dataclass
class RuntimeConfig:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of activations; weights stay float32
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto turns it off where no C++ compiler is found
    threads: int = 0  # CPU threads of each rank; 0 means cores / ranks


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

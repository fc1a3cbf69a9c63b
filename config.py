"""Every setting of a run: dataclasses, read from a TOML file and `--set key=value`.

A section of the TOML file is a dataclass below, a key is a field, its comment is its documentation.
`load_config` reads, `check_config` finds impossible combinations; both raise `ConfigError` with one
line that names the key, the value and the nearest valid choice. Nothing here imports torch, so a
typing mistake is reported before anything heavy is loaded.
"""

import ast
import difflib
import io
import json
import math
import tokenize
import unicodedata
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib


class ConfigError(Exception):
    """A setting is unknown, of the wrong type, or impossible; the message is one line."""


@dataclass
class RunConfig:
    dir: str = ""  # output folder; empty means runs/<config name>-<date>-<time>
    seed: int = 0  # the first weights and the order of the data follow from it
    log_every: int = 10  # steps between log lines; the loss is read, and checked, only there and at the end


@dataclass
class BudgetConfig:
    seconds: float = 300.0  # charged training seconds, the final checkpoint included
    steps: int = 0  # if above 0: stop after so many steps instead, for comparisons
    startup_steps: int = 5  # first steps, not charged: graphs compile here
    startup_allowance: float = 900.0  # start-up seconds beyond this, counted once the data is ready, are charged


@dataclass
class ModelConfig:
    depth: int = 10  # transformer blocks
    width: int = 640  # residual stream
    head_dim: int = 128  # width of one attention head: even, and model.width is a multiple of it
    kv_heads: int = 0  # key/value heads, shared by groups of query heads; 0 means one per query head
    seq_len: int = 1024  # T, tokens a row
    mlp_ratio: float = 4.0  # hidden width of the MLP over the residual width
    window_pattern: str = "L"  # per layer, tiled: L = whole row, S = window; the last layer is always L
    window: int = 256  # keys a query sees in an S layer, itself included
    rope_base: float = 100000.0  # of the rotary embedding: its frequencies fall from 1 to about 1 / rope_base
    qk_gain: float = 1.2  # on each of q and k after their norm: sharper attention at start
    softcap: float = 15.0  # logits = softcap * tanh(logits / softcap); 0 means no cap
    value_embeds: bool = True  # a token -> value table on every second layer, the last included
    smear: bool = False  # add a gated share of the previous token's embedding
    key_offset: bool = False  # slow half of a key's rotary pairs comes from the token before: eases copying
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
    embed_decay: float = 0.001  # AdamW's decoupled weight decay: token embedding ...
    head_decay: float = 0.01  # ... output head ...
    value_decay: float = 0.01  # ... value embeddings ...
    ngram_decay: float = 0.0  # ... n-gram tables
    ngram_beta: float = 0.95  # decay of the second moment of an n-gram row


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
    max_seconds: float = 600.0  # each layout is scored for so long at most; val_complete says whether it was whole
    packed: bool = True  # also score rows packed from BOS, as nanochat lays them out
    icl: bool = True  # in-context-learning scores


@dataclass
class KernelsConfig:
    backend: Literal["torch"] = "torch"  # who computes the model's ops


@dataclass
class RuntimeConfig:
    device: Literal["auto", "cpu", "cuda", "neuron", "xla"] = "auto"  # xla: PyTorch up to 2.9; neuron: 2.10 on
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


# Least and greatest value of every number (of every element, for a list). Wide on purpose: they catch
# slips such as a missing exponent, not bad taste; what depends on another setting is in check_config.
RANGES: dict[str, tuple[float, float]] = {
    "run.seed": (0, 2**32 - 1),  # numpy takes no more
    "run.log_every": (1, 10**9),
    "budget.seconds": (0, 10**7),
    "budget.steps": (0, 10**9),
    "budget.startup_steps": (0, 10**6),
    "budget.startup_allowance": (0, 10**6),
    "model.depth": (1, 1000),
    "model.width": (2, 2**17),
    "model.head_dim": (2, 4096),
    "model.kv_heads": (0, 2**16),
    "model.seq_len": (2, 2**20),
    "model.mlp_ratio": (0.5, 64),
    "model.window": (1, 2**20),
    "model.rope_base": (1, 10**12),
    "model.qk_gain": (0.01, 100),
    "model.softcap": (0, 10**4),
    "model.ngram_orders": (2, 8),
    "model.ngram_rows": (2, 2**28),
    "train.batch_tokens": (2, 2**30),
    "train.micro_rows": (0, 2**24),
    "train.warmup_steps": (0, 10**9),
    "train.cooldown": (0, 1),
    "train.final_lr": (0, 1),
    "train.batch_warmup": (0, 1),
    "train.max_loss": (1, 10**9),
    "optim.matrix_lr": (0, 10),
    "optim.matrix_decay": (0, 10),
    "optim.momentum": (0, 0.9999),
    "optim.momentum_steps": (0, 10**9),
    "optim.momentum_final": (0, 0.9999),
    "optim.variance_beta": (0, 0.9999),
    "optim.embed_lr": (0, 10),
    "optim.head_lr": (0, 10),
    "optim.value_lr": (0, 10),
    "optim.ngram_lr": (0, 10),
    "optim.scalar_lr": (0, 10),
    "optim.embed_decay": (0, 10),
    "optim.head_decay": (0, 10),
    "optim.value_decay": (0, 10),
    "optim.ngram_decay": (0, 10),
    "optim.ngram_beta": (0, 0.9999),
    "data.vocab_size": (258, 2**20),  # the 256 bytes, BOS, and at least one merge
    "data.pool_rows": (1, 10**8),
    "data.shards": (1, 6542),  # all of ClimbMix but its last shard, which is for validation
    "eval.every": (0, 10**7),
    "eval.tokens": (0, 10**12),
    "eval.batch_rows": (1, 2**16),
    "eval.max_seconds": (1, 10**6),
    "runtime.threads": (0, 4096),
}


def load_config(path: str, sets: list[str]) -> Config:
    """The settings in the TOML file at `path`, then each `section.key=VALUE` of `sets` on top, in order.

    VALUE is TOML; a bare word is a string. Types and single values are checked here, combinations in
    `check_config`, which needs the number of ranks. Raises ConfigError.
    """
    config, where = Config(), f"{_line(path, 200) or _show(path)}: "
    for section, table in _read_file(path, where).items():
        _check_section(section, table, where)
        for key, value in table.items():
            _assign(config, f"{section}.{key}", value, where)
    for item in sets:
        key, equals, text = (part.strip() for part in item.partition("="))
        if not (key and equals):
            nearest = f"{_closest_key(key) if key else 'model.depth'}=VALUE"
            raise ConfigError(f"--set {_show(item)}: is not of the form section.key=VALUE; nearest is {nearest}")
        _assign(config, key, _parse_value(key, text), "--set ")
    return config


def check_config(config: Config, world_size: int) -> None:
    """Raise ConfigError if the settings cannot work, alone or together, on `world_size` ranks."""
    if world_size < 1:
        raise ConfigError(f"world size = {world_size}: must be at least 1; nearest is 1")
    for key in _keys():  # a Config made or edited in code is checked like one that was read
        _assign(config, key, _get(config, key), "")
    _check_model(config)
    _check_batch(config, world_size)
    budget, vocab = config.budget, config.data.vocab_size
    if budget.seconds == 0 and budget.steps == 0:
        _fail("", "budget.seconds", 0.0, "must be above 0 when budget.steps is 0", "300")
    if config.train.max_loss <= math.log(vocab):  # an untrained model is at ln(vocabulary)
        problem = f"must be above ln(data.vocab_size) = {math.log(vocab):.2f}, the loss before training"
        _fail("", "train.max_loss", config.train.max_loss, problem, str(math.ceil(math.log(vocab)) + 1))
    if 0 < config.eval.tokens < config.model.seq_len:
        problem = f"must be 0 (the whole split) or at least one row of model.seq_len = {config.model.seq_len}"
        _fail("", "eval.tokens", config.eval.tokens, problem, str(config.model.seq_len))


def _check_model(config: Config) -> None:
    """Heads, windows and n-gram orders."""
    m = config.model
    head_dims = [d for d in _divisors(m.width) if d % 2 == 0]  # the rotary embedding turns pairs
    if m.head_dim % 2:
        nearest = _closest(m.head_dim, head_dims) if head_dims else m.head_dim + 1
        _fail("", "model.head_dim", m.head_dim, "must be even", str(nearest))
    if m.width % m.head_dim:
        choices = [f"model.width = {w}" for w in _multiples(m.width, m.head_dim)]
        choices += [f"model.head_dim = {_closest(m.head_dim, head_dims)}"] if head_dims else []
        _fail("", "model.width", m.width, f"is no multiple of model.head_dim = {m.head_dim}", " or ".join(choices))
    heads = m.width // m.head_dim
    if m.kv_heads and heads % m.kv_heads:
        nearest = _closest(m.kv_heads, _divisors(heads))
        problem = f"does not divide the {heads} query heads (model.width / model.head_dim)"
        _fail("", "model.kv_heads", m.kv_heads, problem, str(nearest))
    if not m.window_pattern or set(m.window_pattern) - set("LS"):
        nearest = "".join(c for c in m.window_pattern.upper() if c in "LS") or "L"
        _fail("", "model.window_pattern", m.window_pattern, "must be made of the letters L and S", _show(nearest))
    if len(set(m.ngram_orders)) < len(m.ngram_orders):
        problem = "names an order twice"
        _fail("", "model.ngram_orders", m.ngram_orders, problem, _show(sorted(set(m.ngram_orders))))


def _check_batch(config: Config, world_size: int) -> None:
    """The batch cut into ranks, rows and micro-batches, during its warm-up too."""
    t, seq_len = config.train, config.model.seq_len
    unit = world_size * seq_len
    if t.batch_tokens % unit:
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        problem = f"is no multiple of {ranks} x model.seq_len {seq_len} = {unit}"
        nearest = " or ".join(str(m) for m in _multiples(t.batch_tokens, unit))
        _fail("", "train.batch_tokens", t.batch_tokens, problem, nearest)
    rows = t.batch_tokens // unit
    if t.micro_rows and rows % t.micro_rows:
        problem = f"does not divide the {rows} rows of a rank (train.batch_tokens / ranks / model.seq_len)"
        _fail("", "train.micro_rows", t.micro_rows, problem, str(_closest(t.micro_rows, _divisors(rows))))
    micro_batches = rows // (t.micro_rows or rows)
    before = 0.0
    for i, stage in enumerate(t.batch_warmup):
        key = f"train.batch_warmup[{i}]"
        if len(stage) != 2:
            _fail("", key, stage, "must be a pair [until, share of the batch]", "[0.1, 0.5]")
        until, share = stage
        if until <= before:
            problem = f"ends at {until}, which is not above {before}, the end of the stage before"
            _fail("", key, stage, problem, _show([round((before + 1) / 2, 6), share]))
        before = until
        if not _is_whole(share * micro_batches):
            nearest = [_show([until, max(round(share * micro_batches), 1) / micro_batches])]
            smaller = [d for d in _divisors(rows) if _is_whole(share * (rows // d))]
            nearest += [f"train.micro_rows = {smaller[-1]}"] if smaller else []
            problem = f"share {share} of a rank's {micro_batches} micro-batches (see train.micro_rows) is not whole"
            _fail("", key, stage, problem, " or ".join(nearest))


def config_to_toml(config: Config) -> str:
    """Every setting as TOML text, from which `load_config` makes an equal Config."""
    lines = []
    for section in fields(config):
        lines.append(f"[{section.name}]")
        table = getattr(config, section.name)
        lines += [f"{f.name} = {_toml(getattr(table, f.name))}" for f in fields(table)]
        lines.append("")
    return "\n".join(lines)


def describe_keys() -> str:
    """Every key with its default, type and the comment behind its field in this file: for `--help`."""
    source = Path(__file__).read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    lines = []
    for section, cls in get_type_hints(Config).items():
        lines.append(f"[{section}]")
        hints, defaults = get_type_hints(cls), cls()
        for node in classes[cls.__name__].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                setting = f"{section}.{name} = {_toml(getattr(defaults, name))}"
                lines.append(f"  {setting:<36} {_type_name(hints[name])}: {comments.get(node.end_lineno, '')}")
    return "\n".join(lines)


def _keys() -> list[str]:
    """All keys as "section.key"."""
    return [f"{section}.{f.name}" for section, cls in get_type_hints(Config).items() for f in fields(cls)]


def _get(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _read_file(path: str, where: str) -> dict[str, Any]:
    """The TOML document at `path`."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")  # editors on Windows may put a mark in front
    except FileNotFoundError:
        raise ConfigError(f"{where}no such file; {_nearest_file(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{where}is a folder, not a file; {_nearest_file(path)}") from None
    except UnicodeDecodeError as e:
        line = e.object[: e.start].count(b"\n") + 1
        raise ConfigError(f"{where}is not UTF-8 text (line {line}); {_nearest_file(path)}") from None
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name
        reason = getattr(e, "strerror", None) or e
        raise ConfigError(f"{where}cannot be read ({reason}); {_nearest_file(path)}") from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as e:
        problem = _line(str(e), 200).replace("end of document", f"line {text.count(chr(10)) + 1}, the end")
        raise ConfigError(f"{where}is not valid TOML: {problem}") from None


def _nearest_file(path: str) -> str:
    """A hint: the configuration file most like `path`."""
    here = Path(__file__).parent / "configs"
    names = {p.name for p in here.glob("*.toml")}
    nearest = _closest_name(Path(path).name, sorted(names))
    return f"nearest is configs/{nearest}" if nearest else "name a .toml file"


def _parse_value(key: str, text: str) -> Any:
    """The value of a --set: TOML, or else a bare word."""
    try:
        document = tomllib.loads(f"value = {text}")
        if list(document) == ["value"]:
            return document["value"]
    except (ValueError, RecursionError):
        pass
    if text[:1] in ('"', "'", "[", "{"):  # meant as TOML
        raise ConfigError(f"--set {_line(key)} = {_show(text)}: is not valid TOML; check its quotes and brackets")
    return text


def _check_section(name: str, table: Any, where: str) -> None:
    """Raise ConfigError unless the top-level entry `name` of a file is a section, and written as one."""
    sections = [f.name for f in fields(Config)]
    if not isinstance(table, dict):
        nearest = f"[{name}]" if name in sections else _closest_key(name)
        _fail(where, name, table, "is not in a section" if name not in sections else "must be a section", nearest)
    if name not in sections:
        nearest = f"[{_closest_name(name, sections)}]"
        if not table:
            raise ConfigError(f"{where}[{_line(name)}]: no such section; nearest is {nearest}")
        key, value = next(iter(table.items()))
        _fail(where, f"{name}.{key}", value, f"no section [{_line(name)}]", nearest)


def _assign(config: Config, key: str, value: Any, where: str) -> None:
    """Set `key` ("section.name") to `value` after checking name, type and range."""
    if key not in _keys():
        _fail(where, key, value, "no such key", _closest_key(key))
    section, name = key.split(".")
    table = getattr(config, section)
    setattr(table, name, _fit(key, value, get_type_hints(type(table))[name], where))


def _fit(key: str, value: Any, hint: Any, where: str) -> Any:
    """`value` as the type `hint`, or ConfigError; an element of a list is named key[i]."""
    if get_origin(hint) is list:
        if not isinstance(value, list):
            _fail(where, key, value, f"must be a {_type_name(hint)}", _show(_example(hint, value)))
        return [_fit(f"{key}[{i}]", v, get_args(hint)[0], where) for i, v in enumerate(value)]
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if not isinstance(value, str) or value not in choices:
            nearest = _closest_name(str(value), choices)
            _fail(where, key, value, f"must be {_type_name(hint)}", _show(nearest))
        return value
    if hint is bool:
        if not isinstance(value, bool):
            nearest = str(value).lower() in ("1", "true", "yes", "on")
            _fail(where, key, value, "must be true or false", _show(nearest))
        return value
    if hint is str:
        if not isinstance(value, str):
            _fail(where, key, value, "must be a string, in quotes", _show(str(value)))
        if any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in value):
            clean = "".join(c for c in value if unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp"))
            _fail(where, key, value, "must not hold control characters", _show(clean))
        if not value and key in ("data.path", "data.cache_dir"):
            _fail(where, key, value, "must not be empty", _show(_get(Config(), key)))
        return value
    low, high = RANGES[key.partition("[")[0]]
    allowed = int if hint is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        kind = "a whole number" if hint is int else "a number"
        _fail(where, key, value, f"must be {kind}", _show(_as_number(key, value, hint)))
    if not low <= value <= high:  # also catches nan; before float(), which overflows on a huge int
        _fail(where, key, value, f"must be from {low} to {high}", _show(_as_number(key, value, hint)))
    return hint(value)


def _as_number(key: str, value: Any, hint: type) -> float:
    """The valid number nearest to whatever was given; for what is no number, the default."""
    low, high = RANGES[key.partition("[")[0]]
    try:
        number = value if isinstance(value, int) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if number != number:
        default = _get(Config(), key) if "[" not in key else low
        return hint(default)
    return hint(round(min(max(number, low), high)) if hint is int else min(max(number, low), high))


def _example(hint: Any, value: Any) -> list:
    """A list of the right type for an error message: [value] where that would do."""
    if get_args(hint)[0] is int:
        return [value] if isinstance(value, int) and not isinstance(value, bool) else [2, 3]
    return [[0.1, 0.5]]


def _is_whole(x: float) -> bool:
    """Whether x is 1, 2, 3, ... but for rounding."""
    return round(x) >= 1 and abs(x - round(x)) < 1e-6


def _divisors(n: int) -> list[int]:
    """The divisors of n, rising."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _multiples(n: int, unit: int) -> list[int]:
    """The multiples of `unit` just below and above `n`, without 0."""
    return [m for m in (n // unit * unit, (n // unit + 1) * unit) if m > 0]


def _closest(n: int, choices: list[int]) -> int:
    return min(choices, key=lambda c: (abs(c - n), c))


def _closest_name(name: str, choices: Any) -> str:
    """The choice most like `name`; "" if there is none to choose from."""
    lower = {c.lower(): c for c in choices}
    matches = difflib.get_close_matches(name.lower()[:80], lower, n=1, cutoff=0.0)
    return lower[matches[0]] if matches else ""


def _closest_key(key: str) -> str:
    """The key most like `key`; the same name in another section comes first."""
    name = key.rpartition(".")[2].lower()
    same = [k for k in _keys() if k.partition(".")[2] == name]
    return _closest_name(key, same or _keys())


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(_show(c) for c in get_args(hint))
    if get_origin(hint) is list:
        return f"list of {_type_name(get_args(hint)[0])}"
    return hint.__name__


def _toml(value: Any) -> str:
    """A TOML value. JSON's escapes are TOML's, but for surrogate pairs: hence not ensure_ascii."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)


def _show(value: Any) -> str:
    """`value` for an error message: as TOML, on one line, not long."""
    try:
        text = str(value) if not isinstance(value, (bool, int, float, str, list)) else _toml(value)
    except ValueError:  # Python prints no int of more than 4,300 digits
        text = "(a huge number)"
    return _line(text)


def _line(text: str, limit: int = 80) -> str:
    """`text` cut to `limit` characters that print on one line."""
    text = text[:limit] + ("..." if len(text) > limit else "")
    return text if text.isprintable() else ascii(text)[1:-1]


def _fail(where: str, key: str, value: Any, problem: str, nearest: str) -> NoReturn:
    """Raise the one-line error."""
    raise ConfigError(f"{where}{_line(key)} = {_show(value)}: {problem}; nearest is {nearest}")

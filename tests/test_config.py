"""Settings: reading, one-line errors, impossible combinations, the round trip, the shipped files, the packaging."""

import ast
import dataclasses
import math
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement

import config
from config import Config, ConfigError, check_config, config_to_toml, describe_keys, load_config

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
SECTIONS = {f.name: f.type for f in dataclasses.fields(Config)}
HINTS = {f"{s}.{k}": hint for s, cls in SECTIONS.items() for k, hint in typing.get_type_hints(cls).items()}


def get(cfg, key):
    section, name = key.split(".")
    return getattr(getattr(cfg, section), name)


def put(cfg, key, value):
    section, name = key.split(".")
    setattr(getattr(cfg, section), name, value)


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A file without settings: everything at its default."""
    path = tmp_path_factory.mktemp("config") / "empty.toml"
    path.write_text("# nothing\n")
    return str(path)


def error(path, sets=(), world_size=1):
    """The error for these settings, which must be one line of sensible length."""
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(path, list(sets)), world_size)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 500, message
    return message


# Reading


def test_a_file_overrides_defaults_and_a_set_overrides_the_file(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('run.dir = "runs/a"\n[model]\ndepth = 4\nngram_orders = [2, 3]\n[train]\ncooldown = 0\n')
    cfg = load_config(str(path), ["model.depth=5", "model.depth = 6 ", "data.rows=packed", "model.smear=true"])
    want = Config()
    want.run.dir, want.model.depth, want.model.ngram_orders = "runs/a", 6, [2, 3]
    want.train.cooldown, want.data.rows, want.model.smear = 0.0, "packed", True
    assert cfg == want
    assert type(cfg.train.cooldown) is float


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("run.dir=runs/x", "runs/x"),
        ("run.dir=", ""),
        ("run.dir=a=b", "a=b"),
        ("run.dir='a b'", "a b"),
        ('run.dir="5"', "5"),
        ("run.dir=/data/été", "/data/été"),
        ("data.path=../texts", "../texts"),
        ("runtime.device=cuda", "cuda"),
        ("runtime.device='cuda'", "cuda"),
        ("model.ngram_orders=[]", []),
        ("model.ngram_orders=[2,3]", [2, 3]),
        ("train.batch_warmup=[[0.1, 1]]", [[0.1, 1.0]]),
        ("train.batch_tokens=131_072", 131072),
        ("train.batch_tokens=0x10000", 65536),
        ("optim.embed_lr=1e-3", 0.001),
        ("optim.embed_lr=1", 1.0),
        ("model.value_embeds=false", False),
    ],
)
def test_set_values(empty, item, value):
    got = get(load_config(empty, [item]), item.split("=")[0])
    assert got == value and repr(got) == repr(value)  # repr tells 1 from 1.0 and True


@pytest.mark.parametrize("text", [b"", b"# c\r\n[model]\r\ndepth = 10\r\n", b"\xef\xbb\xbf[model]\ndepth = 10\n"])
def test_empty_dos_and_byte_order_mark_files(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_bytes(text)
    assert load_config(str(path), []) == Config()


def test_configs_share_no_lists(empty):
    first = load_config(empty, [])
    first.model.ngram_orders.append(2)
    assert load_config(empty, []).model.ngram_orders == [] == Config().model.ngram_orders


def test_reading_settings_imports_nothing_heavy():
    code = "import config, sys; print([m for m in ('torch', 'numpy', 'pyarrow', 'tokenizers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Errors. Each line: settings, ranks, and what the message must name: key and value, then the nearest valid choice.

BAD = [
    ("model.dept=6", 1, "model.dept = 6", "model.depth"),
    ("MODEL.DEPTH=6", 1, "MODEL.DEPTH = 6", "model.depth"),
    ("depth=6", 1, "depth = 6", "model.depth"),
    ("train.depth=6", 1, "train.depth = 6", "model.depth"),  # right name, wrong section
    ("modle.depth=6", 1, "modle.depth = 6", "model.depth"),
    ("model.depth.x=6", 1, "model.depth.x = 6", "model.depth"),
    ("model=6", 1, "model = 6", "model."),
    ("model.depth", 1, "model.depth", "model.depth=VALUE"),
    ("", 1, '""', "=VALUE"),
    ("=6", 1, '"=6"', "=VALUE"),
    ("model.depth=six", 1, 'model.depth = "six"', "10"),
    ("model.depth=6.5", 1, "model.depth = 6.5", "6"),
    ("model.depth=true", 1, "model.depth = true", "1"),
    ("model.depth=", 1, 'model.depth = ""', "10"),
    ("model.depth=nan", 1, "model.depth = nan", "10"),
    ("model.depth=inf", 1, "model.depth = inf", "1000"),
    ("model.depth=0", 1, "model.depth = 0", "1"),
    ("model.depth=-3", 1, "model.depth = -3", "1"),
    ("model.depth=[6]", 1, "model.depth = [6]", "10"),
    ("model.depth={a=6}", 1, "model.depth = {'a': 6}", "10"),
    ("model.depth=99999999999999999999", 1, "model.depth = 99999999999999999999", "1000"),
    ("run.seed=0x" + "f" * 5000, 1, "run.seed = ", "4294967295"),
    ("run.seed=-1", 1, "run.seed = -1", "0"),
    ("run.log_every=0", 1, "run.log_every = 0", "1"),
    ("budget.seconds=nan", 1, "budget.seconds = nan", "300.0"),
    ("budget.seconds=inf", 1, "budget.seconds = inf", "10000000.0"),
    ("budget.seconds=-5", 1, "budget.seconds = -5", "0.0"),
    ("budget.seconds=1e99", 1, "budget.seconds = 1e+99", "10000000.0"),
    ("budget.seconds=1" + "0" * 400, 1, "budget.seconds = 10000", "10000000.0"),  # an int that is no float
    ("budget.seconds=five", 1, 'budget.seconds = "five"', "300.0"),
    ("budget.seconds=true", 1, "budget.seconds = true", "1.0"),
    ("budget.seconds=0", 1, "budget.seconds = 0.0", "300"),
    ("train.cooldown=1.2", 1, "train.cooldown = 1.2", "1.0"),
    ("train.cooldown=.5", 1, 'train.cooldown = ".5"', "0.5"),
    ("train.final_lr=-0.1", 1, "train.final_lr = -0.1", "0.0"),
    ("optim.momentum=1", 1, "optim.momentum = 1", "0.9999"),
    ("model.smear=1", 1, "model.smear = 1", "true"),
    ("model.smear=False", 1, 'model.smear = "False"', "false"),
    ("run.dir=5", 1, "run.dir = 5", '"5"'),
    ("run.dir=1979-05-27", 1, "run.dir = 1979-05-27", '"1979-05-27"'),
    ("run.dir=a\nb", 1, r'run.dir = "a\nb"', '"ab"'),
    ("run.dir=a\udcffb", 1, r"a\udcffb", '"ab"'),  # an argument that is not UTF-8
    ('run.dir="a', 1, "run.dir", "check its quotes"),
    ("data.path=", 1, 'data.path = ""', '"embedded"'),
    ("data.rows=pack", 1, 'data.rows = "pack"', '"packed"'),
    ("data.rows=1", 1, "data.rows = 1", '"'),
    ("runtime.dtype=float16", 1, 'runtime.dtype = "float16"', '"bfloat16"'),
    ("runtime.compile=true", 1, "runtime.compile = true", '"'),
    ("runtime.device=gpu", 1, 'runtime.device = "gpu"', '"cpu"'),
    ("model.ngram_orders=2", 1, "model.ngram_orders = 2", "[2]"),
    ("model.ngram_orders=[2,3", 1, "model.ngram_orders", "check its quotes and brackets"),
    ("model.ngram_orders=[2.5]", 1, "model.ngram_orders[0] = 2.5", "2"),
    ("model.ngram_orders=[2, 1]", 1, "model.ngram_orders[1] = 1", "2"),
    ("model.ngram_orders=[3, 2, 3]", 1, "model.ngram_orders = [3, 2, 3]", "[2, 3]"),
    ("model.width=641", 1, "model.width = 641", "640"),
    ("model.head_dim=96", 1, "model.head_dim = 96", "80"),
    ("model.head_dim=65", 1, "model.head_dim = 65", "64"),
    ("model.head_dim=1", 1, "model.head_dim = 1", "2"),
    ("model.kv_heads=2", 1, "model.kv_heads = 2", "1"),
    ("model.kv_heads=4", 1, "model.kv_heads = 4", "5"),
    ("model.kv_heads=10", 1, "model.kv_heads = 10", "5"),
    ("model.window_pattern=SSX", 1, 'model.window_pattern = "SSX"', '"SS"'),
    ("model.window_pattern=ssl", 1, 'model.window_pattern = "ssl"', '"SSL"'),
    ("model.window_pattern=", 1, 'model.window_pattern = ""', '"L"'),
    ("model.window=0", 1, "model.window = 0", "1"),
    ("train.batch_tokens=65000", 1, "train.batch_tokens = 65000", "64512 or 65536"),
    ("train.batch_tokens=512", 1, "train.batch_tokens = 512", "1024"),
    ("train.batch_tokens=65536", 3, "train.batch_tokens = 65536", "64512 or 67584"),
    ("train.batch_tokens=0", 1, "train.batch_tokens = 0", "2"),
    ("train.micro_rows=7", 1, "train.micro_rows = 7", "8"),
    ("train.micro_rows=3", 8, "train.micro_rows = 3", "2"),
    ("train.micro_rows=-1", 1, "train.micro_rows = -1", "0"),
    ("train.micro_rows=128", 1, "train.micro_rows = 128", "64"),
    ("train.batch_warmup=0.5", 1, "train.batch_warmup = 0.5", "[[0.1, 0.5]]"),
    ("train.batch_warmup=[0.1, 0.5]", 1, "train.batch_warmup[0] = 0.1", "[[0.1, 0.5]]"),
    ("train.batch_warmup=[[0.1]]", 1, "train.batch_warmup[0] = [0.1]", "[0.1, 0.5]"),
    ("train.batch_warmup=[[0.1, 0.5]]", 1, "train.batch_warmup[0] = [0.1, 0.5]", "train.micro_rows = 32"),
    ("train.batch_warmup=[[0.1, 0.3]]", 8, "train.batch_warmup[0] = [0.1, 0.3]", "[0.1, 1.0]"),
    ("train.batch_warmup=[[0.0, 1.0]]", 1, "train.batch_warmup[0] = [0.0, 1.0]", "[0.5, 1.0]"),
    ("train.batch_warmup=[[0.2, 1], [0.2, 1]]", 1, "train.batch_warmup[1] = [0.2, 1.0]", "[0.6, 1.0]"),
    ("train.batch_warmup=[[0.2, 1.5]]", 1, "train.batch_warmup[0][1] = 1.5", "1.0"),
    ("train.max_loss=8", 1, "train.max_loss = 8.0", "11"),
    ("data.vocab_size=257", 1, "data.vocab_size = 257", "258"),
    ("eval.tokens=1000", 1, "eval.tokens = 1000", "1024"),
    ("eval.every=-1", 1, "eval.every = -1", "0.0"),
    ("eval.batch_rows=0", 1, "eval.batch_rows = 0", "1"),
    ("runtime.threads=-1", 1, "runtime.threads = -1", "0"),
]


@pytest.mark.parametrize(("item", "world_size", "setting", "nearest"), BAD, ids=range(len(BAD)))
def test_a_bad_set_names_key_value_and_nearest(empty, item, world_size, setting, nearest):
    message = error(empty, [item], world_size)
    assert setting.replace("\udcff", r"\udcff") in message
    named = re.split(r"; (?:nearest is )?", message)[-1]
    assert nearest in named if not re.fullmatch(r"[\d.]+", nearest) else nearest in re.findall(r"[\d.]+", named)


@pytest.mark.parametrize(("item", "world_size"), [(b[0], b[1]) for b in BAD], ids=range(len(BAD)))
def test_the_nearest_choice_is_valid(empty, item, world_size):
    """Following any advice of the form "value" or "key = value" cures the fault."""
    message = error(empty, [item], world_size)
    advice = message.rpartition("; nearest is ")[2].split(" or ")
    if not message.rpartition("; nearest is ")[1] or re.fullmatch(r"[a-z_]+\.[a-z_]+(=VALUE)?", advice[0]):
        names = re.findall(r"[a-z_]+\.[a-z_]+", advice[-1]) or [item.partition("=")[0]]
        assert names[0] in HINTS  # an existing key, or a remark about its value
        return
    where = re.search(r"([a-z_]+\.[a-z_]+)((?:\[\d\])*) = ", message)
    for choice in advice:
        key, equals, value = choice.rpartition(" = ")
        sets = [item] if equals else []
        if where[2] and not equals:  # an element of a list: put the advice in its place
            whole = tomllib.loads(f"v = {item.partition('=')[2]}")["v"]
            part, new = whole, tomllib.loads(f"v = {value}")["v"]
            indices = [int(i) for i in re.findall(r"\d", where[2])]
            for i in indices[:-1]:
                part = part[i]
            if isinstance(new, list) and not isinstance(part[indices[-1]], list):
                whole = new  # the shape was wrong: the advice shows all of it
            else:
                part[indices[-1]] = new
            value = str(whole)
        sets.append(f"{key or where[1]}={value}")
        try:
            check_config(load_config(empty, sets), world_size)
        except ConfigError as e:
            # Another, new complaint may follow, as for batch_tokens = 2: then it names another value.
            assert message.split(": ")[0].split("--set ")[-1] not in str(e), (sets, str(e))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("depth = 6", ["depth = 6", "model.depth"]),
        ("[modle]", ["[modle]", "[model]"]),
        ("[modle]\ndepth = 6", ["modle.depth = 6", "[model]"]),
        ("[Model]\ndepth = 6", ["Model.depth = 6", "[model]"]),
        ("model = 6", ["model = 6", "[model]"]),
        ("[[model]]\ndepth = 6", ["model", "[model]"]),
        ("[model]\ndepht = 6", ["model.depht = 6", "model.depth"]),
        ("[model]\n'a\\nb' = 6", ["model.a", "model."]),
        ('[model]\n"a\\nb" = 6', [r"model.a\nb = 6", "model."]),
        ("[model.depth]\nx = 1", ["model.depth = {'x': 1}", "10"]),
        ("[model]\ndepth = 6\ndepth =", ["TOML", "line 3"]),
        ("[model]\ndepth = 6\nwidth = 6 4\nsmear = true", ["TOML", "line 3"]),
        ("[model]\n\nwindow_pattern = 'L", ["TOML", "line 3"]),
        ("[model]\nwindow_pattern = 'L\nsmear = true", ["TOML", "line "]),
        ("x = " + "[" * 100_000, ["TOML"]),
        ("x = " + "9" * 5000, ["TOML"]),
        ("x = 0x" + "f" * 5000, ["x = ", "nearest"]),
        ("k" * 5000 + " = 1", ["kkk", "..."]),
    ],
)
def test_bad_files(tmp_path, text, parts):
    path = tmp_path / "c.toml"
    path.write_text(text)
    message = error(str(path))
    assert str(path) in message
    assert [p for p in parts if p not in message] == []


def test_unreadable_files(tmp_path):
    assert "nearest is configs/trn2.toml" in error("configs/trn_2.toml")
    assert "no such file" in error(str(tmp_path / "none.toml"))
    assert "folder" in error(str(tmp_path))
    assert "folder" in error("")
    assert "UTF-8" in error(sys.executable)
    latin = tmp_path / "latin.toml"
    latin.write_bytes("# ok\n# caf\xe9\n".encode("latin-1"))
    assert "line 2" in error(str(latin))
    assert "cannot be read" in error(str(latin / "below-a-file.toml"))
    assert "cannot be read" in error("a\0b")
    assert "cannot be read" in error("x" * 5000)
    assert "no such file" in error("two\nlines.toml")


def test_a_file_without_read_permission(monkeypatch, empty):
    def refuse(path):
        raise PermissionError(13, "Permission denied")  # root may read every file, so it has to be staged

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "cannot be read (Permission denied)" in error(empty)


@pytest.mark.parametrize("world_size", [0, -1])
def test_no_ranks(world_size):
    with pytest.raises(ConfigError, match=f"world size = {world_size}"):
        check_config(Config(), world_size)


@pytest.mark.parametrize(("key", "value"), [("model.depth", "6"), ("model.depth", -1), ("train.cooldown", math.nan)])
def test_a_config_edited_in_code_is_checked_too(key, value):
    cfg = Config()
    put(cfg, key, value)
    with pytest.raises(ConfigError, match=key):
        check_config(cfg, 1)


# Properties

words = st.text(st.sampled_from("abdehlmoprstw._-=[]{}\"'#\\ \n\t\0é,0123456789+"), max_size=30)
values = st.recursive(
    st.integers() | st.floats() | st.booleans() | words, lambda inner: st.lists(inner, max_size=3), max_leaves=4
)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.one_of(words, st.tuples(st.sampled_from(sorted(HINTS)), words | values)), max_size=3))
@example([("model.depth", "1\nmodel.width = 2")])
@example([("run.dir", "\\")])
def test_any_set_gives_settings_or_one_line(empty, items):
    sets = [item if isinstance(item, str) else f"{item[0]}={item[1]}" for item in items]
    try:
        cfg = load_config(empty, sets)
        check_config(cfg, 2)
    except ConfigError as e:
        assert str(e).isprintable() and 0 < len(str(e)) < 500
    else:
        assert tomllib.loads(config_to_toml(cfg)) == dataclasses.asdict(cfg)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_any_file_gives_settings_or_one_line(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    try:
        load_config(str(path), [])
    except ConfigError as e:
        assert str(e).isprintable() and len(str(e)) < 500


def valid(key, hint):
    """A strategy for valid values of a key."""
    if typing.get_origin(hint) is list:
        return st.lists(valid(key, typing.get_args(hint)[0]), max_size=3)
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    if hint is bool:
        return st.booleans()
    if hint is str:
        refused = ("Cc", "Cs", "Zl", "Zp")
        return st.text(st.characters(exclude_categories=refused), min_size=key in ("data.path", "data.cache_dir"))
    low, high = config.RANGES[key]
    return st.integers(low, high) if hint is int else st.floats(low, high)


@settings(deadline=None, max_examples=150)
@given(st.fixed_dictionaries({key: valid(key, hint) for key, hint in HINTS.items()}))
def test_round_trip(tmp_path_factory, choices):
    cfg = Config()
    for key, value in choices.items():
        put(cfg, key, value)
    text = config_to_toml(cfg)
    assert tomllib.loads(text) == dataclasses.asdict(cfg)
    path = tmp_path_factory.getbasetemp() / "round.toml"
    path.write_text(text, encoding="utf-8")
    again = load_config(str(path), [])
    assert again == cfg
    assert config_to_toml(again) == text  # == does not tell 1 from 1.0 or True


@settings(deadline=None, max_examples=400)
@given(
    st.integers(1, 12).map(lambda n: 8 * n),
    st.integers(1, 24),
    st.integers(0, 8),
    st.integers(1, 4),
    st.integers(1, 3000),
    st.integers(0, 12),
)
def test_check_config_agrees_with_the_definition(width, head_dim, kv_heads, world_size, batch_tokens, micro_rows):
    cfg = Config()
    cfg.model.width, cfg.model.head_dim, cfg.model.kv_heads, cfg.model.seq_len = width, head_dim, kv_heads, 16
    cfg.train.batch_tokens, cfg.train.micro_rows = batch_tokens + 1, micro_rows
    heads_fit = width % head_dim == 0 and head_dim % 2 == 0
    groups_fit = heads_fit and (kv_heads == 0 or (width // head_dim) % kv_heads == 0)
    rows, rest = divmod(batch_tokens + 1, 16)
    rows_fit = rest == 0 and rows % world_size == 0 and (micro_rows == 0 or (rows // world_size) % micro_rows == 0)
    try:
        check_config(cfg, world_size)
        possible = True
    except ConfigError:
        possible = False
    assert possible == (groups_fit and rows_fit)


@pytest.mark.parametrize(("micro_rows", "share", "whole"), [(1, 1 / 3, True), (2, 0.5, True), (2, 1 / 3, True),
    (4, 0.5, False), (4, 1 / 3, True), (0, 0.5, False), (0, 1.0, True), (1, 0.01, False), (1, 0.0, False)])  # fmt: skip
def test_batch_warmup_takes_whole_micro_batches(empty, micro_rows, share, whole):
    sets = ["model.seq_len=64", "train.batch_tokens=1536", f"train.micro_rows={micro_rows}"]  # 12 rows a rank
    sets.append(f"train.batch_warmup=[[0.1, {share}], [0.2, 1.0]]")
    if whole:
        check_config(load_config(empty, sets), 2)
    else:
        assert "train.batch_warmup[0]" in error(empty, sets, 2)


# Documentation


def test_every_number_has_a_range_that_holds_its_default():
    def scalar(hint):
        return scalar(typing.get_args(hint)[0]) if typing.get_origin(hint) is list else hint

    numbers = {key for key, hint in HINTS.items() if scalar(hint) in (int, float)}
    assert set(config.RANGES) == numbers
    check_config(Config(), 1)  # the defaults are possible


def test_help_has_every_key_with_type_default_and_comment():
    lines = describe_keys().splitlines()
    assert [line for line in lines if line.startswith("[")] == [f"[{name}]" for name in SECTIONS]
    body = [line for line in lines if not line.startswith("[")]
    source = (ROOT / "config.py").read_text(encoding="utf-8")
    for line, (key, hint) in zip(body, HINTS.items(), strict=True):
        section, name = key.split(".")
        default = get(Config(), key)
        shown = f'"{default}"' if isinstance(default, str) else str(default).lower()
        assert line.startswith(f"  {key} = {shown} ")
        text = source[source.index(f"class {SECTIONS[section].__name__}") :]
        comment = re.search(rf"^    {name}: .*?  # (.+)$", text.partition("\n\n")[0], re.MULTILINE)
        assert comment, f"{key} has no comment in config.py"
        assert line.endswith(f": {comment[1]}")
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        assert all(f'"{choice}"' in line for choice in choices)


# The shipped files

FILES = sorted((ROOT / "configs").glob("*.toml"))
RANKS = {"smoke.toml": [1, 2, 3], "trn1.toml": [1, 2], "trn2.toml": [4, 8]}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_shipped_configs_work_at_their_ranks(path):
    stated = re.search(r"^# Ranks: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    ranks = [int(n) for n in stated[1].split(",")] if stated else [1]
    assert ranks == RANKS.get(path.name, ranks)
    for world_size in ranks:
        check_config(load_config(str(path), []), world_size)


def test_all_configs_are_there():
    assert set(RANKS) <= {p.name for p in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_shipped_configs_state_their_parameters(path):
    """A "# 58.3M parameters: blocks 42.6M, ..." line agrees with a count by hand."""
    stated = re.search(r"^# ([\d.]+)M parameters: (.+)\.$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert stated or path.name not in ("trn1.toml", "trn2.toml")
    if stated:
        cfg = load_config(str(path), [])
        m, vocab = cfg.model, cfg.data.vocab_size
        kv_width = (m.kv_heads or m.width // m.head_dim) * m.head_dim
        count = {
            "blocks": m.depth * m.width * (2 * m.width + 2 * kv_width + 2 * round(m.mlp_ratio * m.width)),
            "embedding": vocab * m.width,
            "head": vocab * m.width,
            "value embeddings": m.value_embeds * ((m.depth + 1) // 2) * vocab * kv_width,
            "n-gram tables": len(m.ngram_orders) * m.ngram_rows * m.width,
        }
        groups = dict(re.fullmatch(r"([a-z -]+) ([\d.]+)M", part).groups() for part in stated[2].split(", "))
        assert {k: float(v) for k, v in groups.items()} == {k: round(n / 1e6, 1) for k, n in count.items() if n}
        assert float(stated[1]) == round(sum(count.values()) / 1e6, 1)


def test_trn2_is_the_run_that_was_asked_for():
    cfg = load_config(str(ROOT / "configs/trn2.toml"), [])
    assert cfg.budget.seconds == 1800 and cfg.data.vocab_size == 8192
    assert (cfg.model.depth, cfg.model.width, cfg.model.head_dim, cfg.model.seq_len) == (10, 640, 128, 1024)


# The packaging

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DECLARED = [Requirement(r) for r in PROJECT["dependencies"]]
TESTING = [Requirement(r) for r in PROJECT["optional-dependencies"]["test"]]


def imported(folders):
    """Names of the third-party modules that the Python files directly in the folders import."""
    names = set()
    for path in (p for folder in folders for p in (ROOT / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.partition(".")[0])
    own = {p.stem for p in ROOT.glob("*.py")} | {"data", "eval", "kernels", "tests"}
    return names - set(sys.stdlib_module_names) - own


def test_every_import_is_declared():
    declared = {r.name for r in DECLARED}
    neuron = {name.replace("-", "_") for name in PROJECT["optional-dependencies"]["neuron"]}
    declared |= neuron | {"torch_xla"}  # which torch-neuronx up to 2.9 brings along
    assert imported([".", "data", "eval", "kernels"]) - {"tomllib"} <= declared
    also = {r.name for r in TESTING} | {"packaging"}  # pytest's own dependency
    assert imported(["tests", "tests/bench"]) - {"tomllib"} <= declared | also


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_pins_cover_what_is_declared_and_lie_in_its_ranges(python):
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pins = [p for p in pins if not p.marker or p.marker.evaluate({"python_version": python})]
    versions = {p.name: str(p.specifier).removeprefix("==") for p in pins}
    assert len(versions) == len(pins)
    for need in DECLARED + TESTING:
        if need.name != "tomli":  # only for Python 3.10, any version will do
            assert need.specifier.contains(versions[need.name]), need

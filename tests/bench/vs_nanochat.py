"""Tokens per second of nanotrn's train.py beside those of nanochat's scripts.base_train, unmodified, on this CPU.

    python tests/bench/vs_nanochat.py --nanochat ../nanochat --nanochat-python ../nanochat/.venv/bin/python --depth 4

Same architecture (depth x 64 wide, heads of 64, rows of 512 tokens), same batch, same text, vocabularies of the same
size, each trained by its own side. The runs alternate, nanochat then nanotrn and again, one process at a time, so
that a machine that gets slower or faster does so for both. A run's rate is all tokens over all seconds of its steps
after the first 10, data waits included. No timed test: read the table, and run nothing else meanwhile.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from config import ModelConfig  # noqa: E402

SKIP = 10  # steps of each run that do not count: compilation, cold caches
SEQ_LEN, HEAD_DIM, VOCAB = 512, 64, 4096

# nanochat's architecture as settings of nanotrn; depth and width are added. Every key of [model] is here.
MODEL = {
    "head_dim": HEAD_DIM, "kv_heads": 0, "seq_len": SEQ_LEN, "mlp_ratio": 4.0, "window_pattern": "L", "window": 256,
    "rope_base": 100000.0, "qk_gain": 1.2, "softcap": 15.0, "value_embeds": True, "smear": True,
    "key_offset": False, "backout": True,
    "ngram_orders": [], "ngram_rows": 65536,
}  # fmt: skip

# What nanochat's pre-training imports, and the package of it where the name is another.
NANOCHAT_IMPORTS = (
    "torch",
    "numpy",
    "pyarrow",
    "rustbpe",
    "tiktoken",
    "wandb",
    "filelock",
    "requests",
    "jinja2",
    "yaml",
)
PACKAGE = {"yaml": "pyyaml"}
# What it prints.
STEP_LINE = re.compile(r"^step (\d+)/\d+ .*\| dt: ([\d.]+)ms \|", re.MULTILINE)
FACTS = {
    "vocabulary": r"^Vocab size: ([\d,]+)",
    "parameters": r"^total\s*: ([\d,]+)",
    "dtype": r"^COMPUTE_DTYPE: torch\.(\w+)",
}


class BenchError(Exception):
    """The comparison can not be made; the message is one line."""


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanochat", metavar="PATH", type=Path, required=True, help="a checkout of nanochat")
    parser.add_argument("--nanochat-python", metavar="PYTHON", default=sys.executable, help="what to run it with")
    parser.add_argument("--nanotrn-python", metavar="PYTHON", default=sys.executable, help="what to run train.py with")
    parser.add_argument(
        "--base-dir",
        metavar="DIR",
        type=Path,
        default=ROOT / ".cache" / "vs_nanochat",
        help="for shards, tokenizers, compiled code and logs, made where missing (default: %(default)s)",
    )
    parser.add_argument(
        "--config", metavar="FILE", default="configs/cpu.toml", help="for nanotrn; the model is set here"
    )
    parser.add_argument("--depth", type=int, default=4, help="blocks of both models (default: %(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help=f"of each run, the first {SKIP} not timed")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads of each (default: all cores)")
    parser.add_argument("--dtype", choices=("own", "float32", "bfloat16"), default="own",
                        help="of both; own: what each chooses by itself on this machine, the default")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write every number to this file")
    args = parser.parse_args()
    if args.batch_tokens < SEQ_LEN or args.batch_tokens % SEQ_LEN:
        parser.error(f"--batch-tokens {args.batch_tokens}: must be a multiple of the row, {SEQ_LEN}")
    if args.steps < SKIP + 5:
        parser.error(f"--steps {args.steps}: must be at least {SKIP + 5}, since the first {SKIP} are not timed")
    for name in ("depth", "repeats", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be at least 1")
    # both run in other folders
    args.nanochat, args.base_dir = args.nanochat.resolve(), args.base_dir.resolve()
    for name in ("nanochat_python", "nanotrn_python"):
        python = getattr(args, name)
        setattr(args, name, os.path.abspath(shutil.which(python) or python))  # no resolve: a venv's python is a link
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}")
    return args


def run(command, cwd, env, log):
    """Run to the end and return what it printed, both streams, which `log` keeps. Raises BenchError."""
    try:
        done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True)
    except OSError as error:
        raise BenchError(f"{command[0]} can not be started: {error.strerror}") from None
    text, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"{text}\n--- stderr\n{err}", encoding="utf-8")
    if done.returncode:
        lines = (err.strip() or text.strip() or "no output").splitlines()
        raise BenchError(f"{' '.join(str(c) for c in command[:3])}: exit status {done.returncode}: {lines[-1]} ({log})")
    return text


def environment(args, **more):
    """This process's environment without what torchrun left, with the threads and a cache of compiled code."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NANOCHAT_DTYPE")}
    env |= {"OMP_NUM_THREADS": str(args.threads), "TORCHINDUCTOR_CACHE_DIR": str(args.base_dir / "inductor")}
    return env | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"} | more  # nothing goes into the checkout


def nanochat_environment(args):
    env = environment(args, NANOCHAT_BASE_DIR=str(args.base_dir))
    return env if args.dtype == "own" else env | {"NANOCHAT_DTYPE": args.dtype}


def check_interpreter(python, needed, cwd, what):
    """Raise BenchError unless `python` starts and finds the modules `needed`; returns its version of torch."""
    probe = "import importlib.util as u, importlib.metadata as m, json, sys; " \
        "none = [n for n in sys.argv[1:] if u.find_spec(n) is None]; " \
        "print(json.dumps([none, '' if 'torch' in none else m.version('torch')]))"  # fmt: skip
    try:
        done = subprocess.run([python, "-c", probe, *needed], cwd=cwd, capture_output=True, text=True, timeout=120)
        missing, version = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        raise BenchError(f"{what} {python}: is not a Python that can be started") from None
    if missing:
        packages = " ".join(PACKAGE.get(name, name) for name in missing)
        raise BenchError(
            f"{what} {python}: lacks {', '.join(missing)}; install with: {python} -m pip install {packages}"
        )
    return version


def prepare_nanochat(args):
    """Lay the embedded corpus where nanochat looks for its shards, and let it train its tokenizer, once."""
    corpus = ROOT / "data" / "corpus"
    train, val = sorted(corpus.glob("sotu_train_*.parquet")), sorted(corpus.glob("sotu_val_*.parquet"))
    shards = {f"shard_{i:05d}.parquet": file for i, file in enumerate(train + val)}  # its last shard is for validation
    if not train or len(val) != 1:
        raise BenchError(f"{corpus}: should hold sotu_train_*.parquet and one sotu_val_*.parquet")
    folder, tokenizer = args.base_dir / "base_data_climbmix", args.base_dir / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    present = {f.name: f for f in folder.glob("*.parquet")}
    for name, file in present.items():
        if name not in shards or file.read_bytes() != shards[name].read_bytes():
            raise BenchError(f"{file}: is not part of this comparison; give --base-dir a folder of its own")
    if len(present) < len(shards):
        print(f"copying {len(shards)} shards of the embedded corpus to {folder}", flush=True)
        for name, file in shards.items():
            shutil.copyfile(file, folder / f"{name}.tmp")
            os.replace(folder / f"{name}.tmp", folder / name)
    if not (tokenizer / "token_bytes.pt").exists():  # the last file that its training writes
        print(f"training nanochat's tokenizer, vocabulary {VOCAB:,}, in {tokenizer}", flush=True)
        command = (args.nanochat_python, "-m", "scripts.tok_train", f"--vocab-size={VOCAB}")
        run(command, args.nanochat, nanochat_environment(args), args.base_dir / "logs" / "nanochat-tokenizer.log")


def result(step_seconds, args, dtype, parameters):
    """A run's numbers from the seconds of its timed steps."""
    return {
        "tokens_per_second": args.batch_tokens * len(step_seconds) / sum(step_seconds),
        "median_step_seconds": statistics.median(step_seconds),
        "timed_steps": len(step_seconds),
        "dtype": dtype,
        "parameters": parameters,
    }


def time_nanochat(args, repeat):
    tag = "vs_nanotrn"
    options = {
        "run": "dummy", "device-type": "cpu", "depth": args.depth, "head-dim": HEAD_DIM, "window-pattern": "L",
        "max-seq-len": SEQ_LEN, "device-batch-size": args.batch_tokens // SEQ_LEN, "num-iterations": args.steps,
        "total-batch-size": args.batch_tokens, "eval-every": -1, "core-metric-every": -1, "sample-every": -1,
        "model-tag": tag,
    }  # fmt: skip
    command = [args.nanochat_python, "-m", "scripts.base_train", *(f"--{k}={v}" for k, v in options.items())]
    log = args.base_dir / "logs" / f"nanochat-{repeat}.log"
    try:
        text = run(command, args.nanochat, nanochat_environment(args), log)
    finally:
        shutil.rmtree(args.base_dir / "base_checkpoints" / tag, ignore_errors=True)  # it always saves one at the end
    steps = [float(ms) / 1000 for step, ms in STEP_LINE.findall(text) if int(step) >= SKIP]  # steps from 0
    facts = {name: re.search(pattern, text, re.MULTILINE) for name, pattern in FACTS.items()}
    if len(steps) != args.steps - SKIP or None in facts.values():
        raise BenchError(f"nanochat printed other lines than expected, another version? See {log}")
    facts = {name: match[1].replace(",", "") for name, match in facts.items()}
    if int(facts["vocabulary"]) != VOCAB:
        where = args.base_dir / "tokenizer"
        raise BenchError(
            f"nanochat's vocabulary is {facts['vocabulary']}, not {VOCAB}: remove {where}, it is made anew"
        )
    return result(steps, args, facts["dtype"], int(facts["parameters"]))


def time_nanotrn(args, repeat):
    model = MODEL | {"depth": args.depth, "width": 64 * args.depth}
    settings = {f"model.{key}": value for key, value in model.items()} | {
        "data.path": "embedded", "data.vocab_size": VOCAB, "data.cache_dir": str(args.base_dir / "nanotrn-cache"),
        "train.batch_tokens": args.batch_tokens, "train.micro_rows": 0, "train.batch_warmup": [],
        "budget.steps": args.steps, "budget.startup_steps": SKIP // 2, "run.log_every": 1,
        "eval.every": 0, "eval.tokens": SEQ_LEN, "eval.packed": False, "eval.icl": False,  # as little as it can
        "runtime.device": "cpu", "runtime.threads": args.threads,
        "runtime.dtype": "auto" if args.dtype == "own" else args.dtype,
    }  # fmt: skip
    log = args.base_dir / "logs" / f"nanotrn-{repeat}.log"
    with tempfile.TemporaryDirectory(dir=args.base_dir, prefix="run-") as folder:
        folder = str(Path(folder) / "run")
        command = [args.nanotrn_python, "train.py", "--config", args.config]
        for key, value in (settings | {"run.dir": folder}).items():
            command += ["--set", f"{key}={json.dumps(value, ensure_ascii=False)}"]  # such JSON is TOML too
        run(command, ROOT, environment(args), log)
        records = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
        dtype = json.loads((Path(folder) / "environment.json").read_text())["dtype"]
        parameters = json.loads((Path(folder) / "summary.json").read_text())["parameters"]
    at = {r["step"]: r for r in records if "loss" in r}  # steps from 1, each logged at its end
    try:
        pairs = [(at[step - 1], at[step]) for step in range(SKIP + 1, args.steps + 1)]
    except KeyError as error:
        raise BenchError(f"nanotrn logged no step {error}; see {log}") from None
    if any(b["tokens"] - a["tokens"] != args.batch_tokens for a, b in pairs):
        raise BenchError(f"nanotrn's steps are not of {args.batch_tokens} tokens each")
    return result([b["charged_seconds"] - a["charged_seconds"] for a, b in pairs], args, dtype, parameters)


def spread(values):
    """Text "median (least .. greatest)": ratios with decimals, rates without."""
    form = "{:,.0f}" if max(values) >= 100 else "{:.3f}"
    middle, low, high = (form.format(f(values)) for f in (statistics.median, min, max))
    return f"{middle} ({low} .. {high})"


def table(args, runs, ratios):
    """The result as text."""
    lines = [f"{'':<10}{'dtype':<10}{'parameters':>12}  {'tokens/s: median (range)':<32}{'median step':>12}"]
    for name, results in runs.items():
        rate = spread([r["tokens_per_second"] for r in results])
        step = statistics.median(r["median_step_seconds"] for r in results)
        lines.append(
            f"{name:<10}{results[0]['dtype']:<10}{results[0]['parameters']:>12,}  {rate:<32}{step * 1e3:>9,.1f} ms"
        )
    lines.append(f"nanotrn / nanochat, pair by pair: {spread(ratios)}")
    lines.append(f"depth {args.depth}, batch {args.batch_tokens:,} tokens, {args.steps - SKIP} timed steps a run, "
                 f"{args.repeats} run(s) of each, {args.threads} thread(s)")  # fmt: skip
    return "\n".join(lines)


def main():
    args = parse_args()
    other = {f.name for f in fields(ModelConfig)} ^ (set(MODEL) | {"depth", "width"})
    if other:
        raise BenchError(
            f"model.{sorted(other)[0]}: MODEL in {Path(__file__).name} does not say what nanochat has there"
        )
    for script in ("base_train.py", "tok_train.py"):
        if not (args.nanochat / "scripts" / script).is_file():
            raise BenchError(f"--nanochat {args.nanochat}: no scripts/{script} in it, so no checkout of nanochat")
    if not (ROOT / args.config).is_file():
        raise BenchError(f"--config {args.config}: no such file in {ROOT}")
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        raise BenchError("nanochat compiles its model, but no C++ compiler is here: install g++ or clang++")
    torch_versions = {
        "nanochat": check_interpreter(args.nanochat_python, NANOCHAT_IMPORTS, args.nanochat, "--nanochat-python"),
        "nanotrn": check_interpreter(
            args.nanotrn_python, ("torch", "tiktoken", "tokenizers"), ROOT, "--nanotrn-python"
        ),
    }
    if len(set(torch_versions.values())) > 1:
        print(f"note: torch is {torch_versions['nanochat']} for nanochat, {torch_versions['nanotrn']} for nanotrn")
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"note: load average {load:.1f}: other work on this machine makes the numbers uncertain", flush=True)
    prepare_nanochat(args)

    runs, timers = {"nanochat": [], "nanotrn": []}, {"nanochat": time_nanochat, "nanotrn": time_nanotrn}
    for repeat in range(1, args.repeats + 1):
        for name, timer in timers.items():
            runs[name].append(timer(args, repeat))
            print(f"{name} {repeat}/{args.repeats}: {runs[name][-1]['tokens_per_second']:,.0f} tokens/s", flush=True)
        a, b = (runs[name][-1]["parameters"] for name in runs)
        if a != b:
            raise BenchError(f"the models differ: nanochat's has {a:,} parameters, nanotrn's {b:,}")
    ratios = [b["tokens_per_second"] / a["tokens_per_second"] for a, b in zip(*runs.values(), strict=True)]
    print(f"\n{table(args, runs, ratios)}")
    if args.json:
        settings = {
            name: getattr(args, name) for name in ("depth", "batch_tokens", "steps", "repeats", "threads", "dtype")
        }
        summary = {"settings": settings | {"skipped_steps": SKIP, "seq_len": SEQ_LEN, "vocab_size": VOCAB},
                   "torch": torch_versions, "load_average_before": load, "runs": runs,
                   "median": {name: statistics.median(r["tokens_per_second"] for r in rs) for name, rs in runs.items()},
                   "ratios": ratios, "ratio": statistics.median(ratios)}  # fmt: skip
        args.json.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        try:
            main()
        except BenchError as error:
            sys.exit(f"error: {error}")
        sys.exit(0)
    sys.exit(130)

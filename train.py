"""Train a GPT from scratch under a wall-clock budget and score it.

    python train.py --config configs/cpu.toml [--set model.depth=6 ...]
    torchrun --standalone --nproc_per_node=8 train.py --config configs/trn2.toml

Read `main` from top to bottom: settings, device, data, model, start-up, the loop, the final checkpoint, the
scores. The budget counts seconds of training steps, data waits and checkpoints; see clock.py.
"""

import argparse
import json
import math
import shutil
import signal
import sys
import time
from datetime import datetime
from pathlib import Path

STARTED = time.monotonic()  # start-up counts from here, the imports below included

import torch
import torch.distributed as dist
from tqdm import tqdm

import checkpoint
import clock as schedule
import runtime
from clock import BudgetClock
from config import ConfigError, check_config, config_to_toml, describe_keys, load_config
from data.corpus import DataError, open_corpus
from data.loader import Loader, tokenize_split, val_stream
from data.tokenizer import load_tokenizer
from eval.bpb import evaluate_bpb, packed_val_batches, val_bpb
from eval.icl import icl_scores
from model import GPT
from optim import MuonAdamW

GO, BUDGET, SIGNAL, BAD_LOSS = range(4)  # why to stop; where ranks differ, the largest counts
SNAPSHOT_SECONDS = 30.0  # charged seconds between two copies of the weights, kept in case the loss explodes
LINE_SECONDS = 5.0  # least time between two progress lines where the output is no terminal


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=describe_keys(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", metavar="FILE", help="settings, a TOML file such as configs/cpu.toml")
    source.add_argument("--resume", metavar="RUN", help="continue the run in this folder from its newest checkpoint")
    parser.add_argument("--set", metavar="KEY=VALUE", nargs="+", action="extend", default=[], help="override a setting")
    parser.add_argument("--overwrite", action="store_true", help="replace the run folder if it exists")
    args = parser.parse_args()
    if args.resume and args.overwrite:
        parser.error("--overwrite would delete what --resume continues")
    return args


def choose_run(args, cfg, rank, world):
    """The run folder, the same on every rank. Raises ConfigError where it holds another run."""
    choice = [cfg.run.dir or f"runs/{Path(args.config or args.resume).stem}-{datetime.now():%Y%m%d-%H%M%S}"]
    if world > 1:
        dist.broadcast_object_list(choice, src=0, group=runtime.control_group())
    cfg.run.dir = choice[0]
    run = Path(cfg.run.dir)

    def check():
        if rank == 0 and not args.resume and run.exists() and (not run.is_dir() or any(run.iterdir())):
            if not args.overwrite:
                raise ConfigError(
                    f'run.dir = "{run}" exists already; choose another, or use --overwrite or --resume {run}'
                )
            if not (run / "config.toml").exists():
                raise ConfigError(f'run.dir = "{run}" is not a run folder (no config.toml in it): not overwritten')
        return run

    return runtime.rank0_first(world, rank, check)


def make_run(args, cfg, run, rank, world):
    """Make the run folder on rank 0, now that the data is known to be sound; only here is another one replaced."""

    def make():
        if rank > 0:
            return
        try:
            if args.overwrite and run.exists():
                shutil.rmtree(run)
            (run / "checkpoints").mkdir(parents=True, exist_ok=True)
            (run / "config.toml").write_text(config_to_toml(cfg))
        except OSError as error:
            raise ConfigError(f'run.dir = "{run}" can not be written: {error}') from error

    runtime.rank0_first(world, rank, make)


def train_step(model, forward, optimizer, batches):
    """Gradients of all micro-batches, one update. Returns the mean loss of this rank, a tensor on the device."""
    loss_sum, reads = 0.0, []
    for x, y in batches:
        if model.cfg.ngram_orders:  # gradient of the rows read, not of the whole table: see optim.ngram_update
            ids = model.ngram_ids(x)
            rows = torch.nn.functional.embedding(ids, model.ngram).detach().requires_grad_()
            loss = forward(x, y, ngram_rows=rows) / len(batches)
            loss.backward()
            reads.append((ids.flatten(), rows.grad.flatten(0, -2)))
        else:
            loss = forward(x, y) / len(batches)
            loss.backward()
        loss_sum = loss_sum + loss.detach()
    optimizer.step(reads)
    model.zero_grad(set_to_none=True)
    return loss_sum


def mean_over_ranks(loss, world):
    """The loss as a Python float, averaged over the ranks: waits for the device."""
    if world > 1:
        loss = loss.clone()
        dist.all_reduce(loss)
    return float(loss) / world


def evaluate(cfg, rt, model, splits, tokenizer, stream, signals):
    """All scores of the model as {name: number}. Every rank takes part and gets the same. Ends early on a signal."""
    token_bytes = torch.from_numpy(tokenizer.token_bytes).to(rt.device)
    limit = {"max_seconds": cfg.eval.max_seconds, "stop": lambda: bool(signals)}
    where = {"rank": rt.rank, "world": rt.world, "device": rt.device}
    score = val_bpb(
        model, stream, cfg.model.seq_len, tokenizer.token_bytes, cfg.eval.batch_rows,
        max_tokens=cfg.eval.tokens, **limit, **where,
    )  # fmt: skip
    out = {"val_bpb": score["bpb"], "val_tokens": score["tokens"], "val_complete": score["complete"]}
    if cfg.eval.packed:
        batches = packed_val_batches(
            splits["val"], cfg.model.seq_len, cfg.eval.batch_rows, tokenizer.bos_id, max_tokens=cfg.eval.tokens, **where
        )
        out["val_bpb_packed"] = evaluate_bpb(model, batches, len(batches), token_bytes, rt.world, **limit)
    if cfg.eval.icl:
        out |= icl_scores(
            model, stream, cfg.model.seq_len, tokenizer.vocab_size, tokenizer.bos_id, cfg.eval.batch_rows, **where
        )
    return out


def snapshot(step, tokens, model, optimizer, loader):
    """A copy in memory of all that training changes."""
    tensors = {name: t.detach().clone() for name, t in (model.state_dict() | optimizer.own_state()).items()}
    return {"step": step, "tokens": tokens, "loader": loader.state(), "t": optimizer.t} | tensors


def restore(copy, model, optimizer, loader):
    """Go back to a snapshot. Returns its (step, tokens)."""
    with torch.no_grad():
        for name, t in (model.state_dict() | optimizer.own_state()).items():
            t.copy_(copy[name])
    optimizer.t = copy["t"]
    loader.restore(copy["loader"])
    return copy["step"], copy["tokens"]


def measure_save(run, save, rank):
    """Seconds to keep for the final checkpoint: a tenth more than the worst of three trials, which are deleted."""
    took = []
    for _ in range(3):
        began = time.monotonic()
        save("trial")
        took.append(time.monotonic() - began)
    if rank == 0:
        shutil.rmtree(run / "checkpoints" / "trial", ignore_errors=True)
    return 1.1 * max(took) + 0.01


def log(file, record):
    """Append a record to log.jsonl. A full disk costs the line, not the run."""
    try:
        file.write(json.dumps(record) + "\n")
        file.flush()
    except OSError as error:
        tqdm.write(f"warning: log.jsonl misses step {record['step']}: {error}")


def main():
    args = parse_args()
    run_dir = Path(args.resume) if args.resume else None
    cfg = load_config(str(run_dir / "config.toml") if run_dir else args.config, args.set)
    if run_dir:
        cfg.run.dir = str(run_dir)
    rank, world, _ = runtime.ranks()
    check_config(cfg, world)
    resume = None
    if run_dir and (resume := checkpoint.newest(run_dir)) is None:
        raise ConfigError(f"--resume {run_dir}: no checkpoint in {run_dir / 'checkpoints'}")

    rt = runtime.start(cfg.runtime)
    run = choose_run(args, cfg, rank, world)
    say = print if rank == 0 else lambda *_, **__: None

    # data: rank 0 downloads, trains the tokenizer and tokenises; the others then find it in the cache
    def prepare():
        cache = cfg.data.cache_dir
        corpus = open_corpus(cfg.data.path, cache, cfg.data.shards, log=say)
        tokenizer = load_tokenizer(corpus, cfg.data.vocab_size, cache, log=say)
        return tokenizer, {s: tokenize_split(corpus, s, tokenizer, cache, log=say) for s in ("train", "val")}

    tokenizer, splits = runtime.rank0_first(world, rank, prepare)
    make_run(args, cfg, run, rank, world)
    T = cfg.model.seq_len
    stream = val_stream(splits["val"], tokenizer.bos_id, T)
    rank_rows = cfg.train.batch_tokens // (world * T)
    micro_rows = cfg.train.micro_rows or rank_rows
    loader = Loader(
        splits["train"], T, micro_rows, cfg.data.rows, tokenizer.bos_id, cfg.run.seed, cfg.data.pool_rows, rank, world
    )

    torch.manual_seed(cfg.run.seed)
    model = GPT(cfg.model, tokenizer.vocab_size, rt.dtype, cfg.run.seed).to(rt.device)
    forward = torch.compile(model, backend=rt.backend, dynamic=False) if rt.backend else model
    optimizer = MuonAdamW(model, cfg.optim, rank, world, rt.dtype, rt.backend)

    step, tokens, startup_tokens, earlier, reserve, expected = 0, 0, 0, 0.0, 0.0, 0.0
    if resume:
        try:
            weights, optim_state, state = checkpoint.load(resume)
            if state["tokenizer"] != tokenizer.checksum:
                raise DataError(
                    f"{resume} was trained with another tokenizer: is data.path or data.vocab_size changed?"
                )
            model.load_state_dict(weights, strict=True)
            optimizer.load_state_dict(optim_state)
            loader.restore(state["loader"])
            step, tokens, earlier = state["step"], state["tokens"], state["charged"]
            reserve, expected = state["reserve"], state["next_step"]
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"--resume {run_dir}: {resume.name} does not fit this model or is damaged: {reason}"
            ) from None
        startup_tokens = tokens
    # free are the allowance and what came before: imports, downloads, the tokenizer
    allowance = cfg.budget.startup_allowance + time.monotonic() - STARTED
    clock = BudgetClock(cfg.budget.seconds, allowance, started=STARTED, earlier=earlier)
    if resume:
        clock.expect(expected)  # a run whose budget did not allow another step gets no free ones
    first_step, last_startup = step, step + cfg.budget.startup_steps

    peak = runtime.peak_flops(rt.device, rt.dtype)
    counts, flops = model.parameter_counts(), model.flops_per_token()
    environment = runtime.environment(rt) | {"peak_flops": peak, "tokenizer": tokenizer.checksum}
    if rank == 0:
        name = f"environment-{step}.json" if resume else "environment.json"
        (run / name).write_text(json.dumps(environment, indent=2))
    say(f"device {rt.device}, {world} rank(s), {environment['dtype']}, compile {environment['compile']}, "
        f"{peak / 1e9:.0f} GFLOPS measured peak a rank")  # fmt: skip
    say("parameters " + ", ".join(f"{name} {n:,}" for name, n in counts.items()) + f"; {flops / 1e6:.1f} MFLOP a token")
    say(f"batch {cfg.train.batch_tokens:,} tokens = {world} x {rank_rows // micro_rows} x {micro_rows} rows of {T}; "
        f"run folder {run}")  # fmt: skip

    def save(name):
        state = {
            "step": step, "tokens": tokens, "tokenizer": tokenizer.checksum, "config": config_to_toml(cfg),
            "loader": loader.state(), "charged": clock.charged() + reserve, "reserve": reserve,
            "next_step": clock.next_step(), "git_commit": environment["git_commit"],
        }  # fmt: skip
        optim_state = optimizer.state_dict()  # collective: every rank takes part
        if rank == 0:
            checkpoint.save(run / "checkpoints" / name, model.state_dict(), optim_state, state)

    signals, asked_at = [], []

    def on_signal(number, _):
        # one stop may arrive twice, sent to the group and handed on by a parent; only a later Ctrl-C means it
        if signals and number == signal.SIGINT and time.monotonic() - asked_at[0] > 2:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        asked_at.append(time.monotonic())
        signals.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)

    by_steps = cfg.budget.steps > 0
    next_eval, printed, repeats = earlier + cfg.eval.every, -math.inf, False
    logged_tokens, logged_charged = tokens, clock.charged()
    good = candidate = snapshot(step, tokens, model, optimizer, loader)
    log_file, eval_file = (open(run / name, "a") if rank == 0 else None for name in ("log.jsonl", "evals.jsonl"))
    taken, loss = earlier, None
    bar = tqdm(
        total=cfg.budget.steps if by_steps else cfg.budget.seconds, dynamic_ncols=True,
        disable=rank > 0 or not sys.stderr.isatty(), bar_format="{percentage:3.0f}%|{bar}| {desc}",
    )  # fmt: skip
    while True:
        charged_step = step >= last_startup
        if step == last_startup:
            logged_tokens, logged_charged = tokens, clock.charged()
        if step == last_startup and not by_steps:  # start-up ends: learn, before the clock runs, what saving costs
            reserve = measure_save(run, save, rank)
            say(f"start-up took {clock.total():.1f} s; {reserve:.2f} s of the budget are kept for the last checkpoint")

        # does another step fit? every rank has its own clock, and all must do the same
        clock.enter("data" if charged_step else "startup")
        progress = step / cfg.budget.steps if by_steps else clock.progress()
        share = schedule.batch_share(progress, cfg.train.batch_warmup)
        if charged_step:
            clock.step_begins(share)
        spent = step >= cfg.budget.steps if by_steps else not clock.fits(reserve, share)
        stop = SIGNAL if signals else BUDGET if spent else GO
        wants_eval = cfg.eval.every > 0 and clock.charged() >= next_eval
        stop, wants_eval, progress, now = runtime.agree((stop, wants_eval, progress, clock.charged()), world)
        if stop != GO:
            break
        if wants_eval:
            clock.enter("eval")
            scores = evaluate(cfg, rt, model, splits, tokenizer, stream, signals)
            if rank == 0:
                log(eval_file, {"step": step, "charged_seconds": clock.charged(), "tokens": tokens} | scores)
                tqdm.write(f"step {step} | " + " | ".join(f"{k} {v:.4f}" for k, v in scores.items()))
            next_eval = clock.charged() + cfg.eval.every
            clock.enter("data" if charged_step else "startup")

        # one step
        began = clock.total()
        share = schedule.batch_share(progress, cfg.train.batch_warmup)  # once more: the ranks have agreed on progress
        batches = [(x.to(rt.device), y.to(rt.device)) for x, y in loader.next(round(share * rank_rows / micro_rows))]
        clock.enter("step" if charged_step else "startup")
        t, o = cfg.train, cfg.optim
        lr_scale = schedule.learning_rate(step, progress, t.warmup_steps, t.cooldown, t.final_lr)
        momentum = schedule.muon_momentum(step, progress, o.momentum, o.momentum_steps, t.cooldown, o.momentum_final)
        optimizer.set_hyper(lr_scale, momentum, 1.0 - progress)
        loss = train_step(model, forward, optimizer, batches)
        runtime.synchronize(rt.device)
        step, step_tokens = step + 1, len(batches) * micro_rows * T * world
        tokens += step_tokens
        if not charged_step:
            startup_tokens = tokens
            if step == last_startup > first_step + 1:  # the very first one compiles
                clock.expect((clock.total() - began) / share)

        # now and then: look at the loss, write a line, keep a copy of weights that are known to be sound
        if step % cfg.run.log_every == 0 or step == first_step + 1:
            loss = mean_over_ranks(loss, world)
            if not loss <= cfg.train.max_loss:  # NaN too
                stop = BAD_LOSS
                break
            charged = clock.charged()
            rate = (tokens - logged_tokens) / (charged - logged_charged) if charged > logged_charged else 0.0
            logged_tokens, logged_charged = tokens, charged
            record = {
                "step": step, "loss": loss, "charged_seconds": charged, "total_seconds": clock.total(),
                "tokens": tokens, "tokens_per_second": rate, "mfu": rate * flops / (peak * world),
                "epoch": loader.epoch, "lr_scale": lr_scale, "momentum": momentum, "batch_tokens": step_tokens,
            }  # fmt: skip
            if rank == 0:
                log(log_file, record)
                if loader.epoch > 1 and not repeats:
                    repeats = True
                    tqdm.write(f"note: the text repeats from step {step} on; more text or a larger model may do better")
                left = (
                    f"step {step} of {cfg.budget.steps}" if by_steps else f"{cfg.budget.seconds - charged:.0f} s left"
                )
                line = (f"step {step} | loss {loss:.4f} | {rate:,.0f} tok/s | mfu {record['mfu']:.1%} | "
                        f"epoch {loader.epoch:.2f} | {left}")  # fmt: skip
                bar.n = min(bar.total, step if by_steps else charged)
                bar.set_description_str(line)
                if bar.disable and clock.total() - printed >= LINE_SECONDS:
                    printed = clock.total()
                    print(line, flush=True)
            # by the time all ranks agree on, as they must save the same step; none when the budget is nearly spent
            if now - taken >= SNAPSHOT_SECONDS and (by_steps or cfg.budget.seconds - now > SNAPSHOT_SECONDS):
                taken = now
                good, candidate = candidate, snapshot(step, tokens, model, optimizer, loader)

    bar.close()

    # the run is over: the final checkpoint is charged, the scores are not
    if torch.is_tensor(loss):  # of a step that was not logged
        loss = mean_over_ranks(loss, world)
        stop = stop if loss <= cfg.train.max_loss else BAD_LOSS
    trained, bad_step = tokens - startup_tokens, step
    if stop == BAD_LOSS:
        step, tokens = restore(good, model, optimizer, loader)
        say(f"error: loss {loss:.4g} at step {bad_step}: above train.max_loss = {cfg.train.max_loss} or not a number; "
            f"saved the state of step {step}; lower the learning rates", file=sys.stderr)  # fmt: skip
    clock.enter("checkpoint")
    unsaved = 0
    try:
        save(f"step_{step:08d}")
    except OSError as error:
        unsaved = 1
        say(f"error: {error}", file=sys.stderr)
    clock.enter("eval")
    charged = clock.charged()
    scores = {}
    if stop == BUDGET and runtime.agree((len(signals),), world) == [0]:
        scores = evaluate(cfg, rt, model, splits, tokenizer, stream, signals)
    signalled = int(runtime.agree((signals[0] if signals else 0,), world)[0])
    status = 1 if stop == BAD_LOSS else 128 + signalled if signalled else unsaved
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if signalled else signal.SIG_DFL)
    loader.close()
    phases = clock.phases()
    steady = phases["data"] + phases["step"]
    rate = trained / steady if steady else 0.0
    summary = scores | {
        "charged_seconds": charged, "budget_seconds": cfg.budget.seconds, "total_seconds": clock.total(),
        "startup_seconds": phases["startup"], "eval_seconds": phases["eval"], "steps": step, "tokens": tokens,
        "epochs": loader.epoch, "tokens_per_second": rate, "mfu": rate * flops / (peak * world),
        "parameters": counts["total"], "peak_memory_mb": runtime.peak_memory(rt.device) / 2**20, "run": str(run),
    }  # fmt: skip
    if rank == 0:
        print("---")
        for key, value in summary.items():
            print(f"{key}: {value:.6f}" if isinstance(value, float) else f"{key}: {value}", flush=True)
        (run / "summary.json").write_text(json.dumps(summary | {"phases": phases, "status": status}, indent=2))
    if world > 1:
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, DataError) as error:
        if runtime.ranks()[0] == 0:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a full disk, a folder that went away
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)

"""train.py as a user runs it: results, budgets, stops, resume, several ranks, errors. Each run is a process."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
    ENVIRONMENT.pop(name, None)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """One data cache for all runs of this test process."""
    return tmp_path_factory.mktemp("cache")


def command(run, cache, *settings, ranks=1, more=()):
    """A command line that trains configs/smoke.toml, made smaller still, into the folder `run`."""
    python = [sys.executable]
    if ranks > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    small = ["eval.tokens=2048", "model.depth=2", "model.width=32", "budget.startup_steps=2"]
    return [
        *python, "train.py", "--config", "configs/smoke.toml", *more,
        "--set", f"run.dir={run}", f"data.cache_dir={cache}", *small, *settings,
    ]  # fmt: skip


def train(run, cache, *settings, expect=0, **how):
    """Run it to its end. Returns (standard output, standard error)."""
    done = subprocess.run(
        command(run, cache, *settings, **how), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout, done.stderr


def block(output):
    """The result block as {key: text}."""
    return dict(line.split(": ", 1) for line in output.split("---\n")[-1].splitlines())


def losses(run):
    """{step: loss} of the run's log."""
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {r["step"]: r["loss"] for r in records if "loss" in r}


def one_error(stderr):
    """The error line, which must be the only one."""
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in stderr, stderr
    return lines[0]


def test_result_block_and_files(tmp_path, cache):
    run = tmp_path / "run"
    out, _ = train(run, cache)
    result = block(out)
    for key in ("val_bpb", "charged_seconds", "total_seconds", "tokens", "steps", "tokens_per_second", "mfu"):
        assert math.isfinite(float(result[key])), key
    for key in ("parameters", "peak_memory_mb", "icl_gain", "icl_repeat_accuracy", "val_bpb_packed"):
        assert math.isfinite(float(result[key])), key
    assert result["run"] == str(run) and result["steps"] == "12"
    # the first quarter of the 12 steps takes half of the 1,536 tokens
    assert int(result["tokens"]) == 3 * 768 + 9 * 1536
    assert 0 < float(result["val_bpb"]) < 8  # bytes drawn at random need 8 bits
    summary = json.loads((run / "summary.json").read_text())
    assert summary["val_bpb"] == pytest.approx(float(result["val_bpb"]), abs=1e-6)
    assert sum(summary["phases"].values()) == pytest.approx(summary["total_seconds"], rel=0.05)
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(1, 13))
    for record in records:
        assert {"loss", "charged_seconds", "tokens", "tokens_per_second"} <= record.keys()
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"] and environment["variables"]["OMP_NUM_THREADS"] == "1"
    assert (run / "config.toml").exists() and (run / "checkpoints" / "step_00000012" / "model.safetensors").exists()
    first, last = records[0]["loss"], records[-1]["loss"]
    assert last < first - 0.5, "twelve steps must teach it something"


def test_same_seed_same_losses(tmp_path, cache):
    for name in ("a", "b"):
        train(tmp_path / name, cache, "eval.icl=false", "budget.steps=6")
    train(tmp_path / "c", cache, "eval.icl=false", "budget.steps=6", "run.seed=1")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_give_the_same_training(tmp_path, cache, ranks):
    one, _ = train(tmp_path / "one", cache, "budget.steps=8")
    many, _ = train(tmp_path / "many", cache, "budget.steps=8", ranks=ranks)
    a, b = losses(tmp_path / "one"), losses(tmp_path / "many")
    assert a.keys() == b.keys()
    assert [b[s] for s in a] == pytest.approx(list(a.values()), abs=2e-4)
    for key in ("val_bpb", "val_bpb_packed", "icl_gain"):
        assert float(block(many)[key]) == pytest.approx(float(block(one)[key]), abs=1e-3)


@pytest.mark.parametrize("layout", ["stream", "packed"])
def test_resume_continues_bit_for_bit(tmp_path, cache, layout):
    settings = ("eval.icl=false", f"data.rows={layout}")
    train(tmp_path / "whole", cache, *settings, "budget.steps=10")
    train(tmp_path / "parts", cache, *settings, "budget.steps=10", "train.max_loss=30")
    whole = losses(tmp_path / "whole")
    # stop after a few steps as a preempted run does, then continue
    run = tmp_path / "stopped"
    process = subprocess.Popen(command(run, cache, *settings, "budget.steps=10"), cwd=ROOT, env=ENVIRONMENT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    wait_for_steps(run, process, 3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 143
    before = losses(run)
    assert len(before) < 10
    resumed = subprocess.run([sys.executable, "train.py", "--resume", str(run)], cwd=ROOT, env=ENVIRONMENT,
                             capture_output=True, text=True, timeout=240)  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    assert losses(run) == whole == losses(tmp_path / "parts")


def wait_for_steps(run, process, steps):
    """Wait until the run has logged so many steps."""
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if (run / "log.jsonl").exists() and len((run / "log.jsonl").read_text().splitlines()) >= steps:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {steps} steps: {process.communicate()}")


@pytest.mark.parametrize("number,status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_it_with_a_checkpoint(tmp_path, cache, number, status):
    run = tmp_path / "run"
    process = subprocess.Popen(command(run, cache, "budget.steps=100000"), cwd=ROOT, env=ENVIRONMENT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    wait_for_steps(run, process, 4)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == status, out + err
    assert "Traceback" not in err
    steps = int(block(out)["steps"])
    assert (run / "checkpoints" / f"step_{steps:08d}" / "state.json").exists()


def resume(run, *settings, expect):
    """Continue it. Returns (standard output, standard error)."""
    python = [sys.executable, "train.py", "--resume", str(run)]
    done = subprocess.run([*python, "--set", "run.log_every=1", *settings], cwd=ROOT, env=ENVIRONMENT,
                          capture_output=True, text=True, timeout=240)  # fmt: skip
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_a_stop_that_arrives_twice_is_one_stop(tmp_path, cache):
    """A process group's signal also comes from the parent that hands it on: make, torchrun."""
    run = tmp_path / "run"
    process = subprocess.Popen(command(run, cache, "budget.steps=100000"), cwd=ROOT, env=ENVIRONMENT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    wait_for_steps(run, process, 4)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        time.sleep(0.01)
    out, err = process.communicate(timeout=120)
    assert process.returncode in (130, 143), out + err
    assert len(list((run / "checkpoints").glob("step_*"))) == 1
    assert "val_bpb" not in block(out)  # it was not scored


def test_a_finished_budget_gives_no_more_steps(tmp_path, cache):
    run = tmp_path / "run"
    out, _ = train(run, cache, "budget.steps=0", "budget.seconds=1.5", "eval.icl=false", "eval.packed=false")
    first = block(out)
    out, _ = resume(run, expect=0)
    again = block(out)
    assert again["steps"] == first["steps"] and again["tokens"] == first["tokens"]
    assert float(again["charged_seconds"]) <= 1.5 + 0.5  # the same checkpoint once more is all that it pays


def test_what_can_not_be_resumed_is_one_line(tmp_path, cache):
    run = tmp_path / "run"
    train(run, cache, "eval.icl=false", "eval.packed=false", "budget.steps=4")
    _, err = resume(run, "model.depth=3", expect=2)
    assert "step_00000004" in one_error(err)
    _, err = resume(run, "data.vocab_size=400", expect=2)
    assert "tokenizer" in one_error(err)
    weights = run / "checkpoints" / "step_00000004" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    _, err = resume(run, expect=2)
    assert "step_00000004" in one_error(err)


def test_scores_are_shown_although_the_summary_can_not_be_written(tmp_path, cache):
    run = tmp_path / "run"
    train(run, cache, "eval.icl=false", "eval.packed=false", "budget.steps=4")
    (run / "summary.json").unlink()
    (run / "summary.json").mkdir()
    out, err = resume(run, "budget.steps=5", expect=1)
    assert "summary.json" in one_error(err)
    assert math.isfinite(float(block(out)["val_bpb"]))


@pytest.mark.parametrize("seconds", [1.0, 4.0])
def test_budget_is_kept(tmp_path, cache, seconds):
    out, _ = train(tmp_path / "run", cache, "budget.steps=0", f"budget.seconds={seconds}", "eval.icl=false",
                   "train.micro_rows=0", "train.batch_warmup=[]")  # fmt: skip
    charged = float(block(out)["charged_seconds"])
    assert 0 < charged <= seconds
    assert int(block(out)["steps"]) > 2
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log[0]["lr_scale"] < 1 and log[-1]["lr_scale"] < 0.6  # warm-up at first, cooldown at last


def test_a_bad_loss_stops_and_saves_the_last_good_state(tmp_path, cache):
    run = tmp_path / "run"  # at these rates the loss, near ln(512) = 6.2 at first, rises at once
    _, err = train(run, cache, "optim.embed_lr=10", "optim.head_lr=10", "train.warmup_steps=0", "train.max_loss=6.5",
                   expect=1)  # fmt: skip
    assert "loss" in one_error(err) and "step" in one_error(err)
    (saved,) = (run / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("step_")) < 12
    assert all(t.isfinite().all() for t in load_file(saved / "model.safetensors").values())
    # the good state can be continued with other settings
    subprocess.run([sys.executable, "train.py", "--resume", str(run), "--set", "train.max_loss=1000"],
                   cwd=ROOT, env=ENVIRONMENT, check=True, timeout=240)  # fmt: skip
    assert (run / "checkpoints" / "step_00000012").exists()


def test_a_loss_that_explodes_after_the_last_look_is_noticed(tmp_path, cache):
    run = tmp_path / "run"
    out, err = train(run, cache, "optim.embed_lr=10", "optim.head_lr=10", "train.warmup_steps=0", "train.max_loss=6.5",
                     "run.log_every=1000", expect=1)  # fmt: skip
    assert "step 12" in one_error(err)
    assert int(block(out)["steps"]) < 12 and "val_bpb" not in block(out)


def test_bad_input_is_one_line_and_status_2(tmp_path, cache):
    run = tmp_path / "run"
    for settings, named in [
        (["model.deph=3"], "model.depth"),
        (["model.head_dim=15"], "head_dim"),
        (["data.path=/nowhere"], "/nowhere"),
        (["runtime.device=tpu"], "runtime.device"),
        (["model.seq_len=500000", "train.batch_tokens=500000", "train.micro_rows=0", "train.batch_warmup=[]"], "val"),
    ]:
        _, err = train(run, cache, *settings, expect=2)
        assert named in one_error(err), (settings, err)
        assert not run.exists()  # the corrected command must not find it in its way


def test_a_run_folder_is_never_overwritten_unasked(tmp_path, cache):
    run = tmp_path / "run"
    train(run, cache, "eval.icl=false", "budget.steps=3")
    kept = (run / "log.jsonl").read_text()
    _, err = train(run, cache, expect=2)
    assert "--overwrite" in one_error(err) and "--resume" in one_error(err)
    assert (run / "log.jsonl").read_text() == kept
    train(run, cache, "eval.icl=false", "budget.steps=4", more=["--overwrite"])
    assert len(losses(run)) == 4
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    _, err = train(other, cache, more=["--overwrite"], expect=2)
    assert (other / "thesis.txt").read_text() == "mine"

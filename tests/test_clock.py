"""clock.py with a clock made by hand: phases, allowance, the stop before the budget ends, and the schedules."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clock import CHARGED, BudgetClock, batch_share, learning_rate, muon_momentum

PHASES = ["startup", "data", "step", "checkpoint", "eval"]
SECONDS = st.floats(0, 1000, allow_nan=False)
SHARE = st.floats(0, 1, allow_nan=False)


class FakeTime:
    """A monotonic clock that goes on only where told to; it starts anywhere."""

    def __init__(self, start=None):
        self.t = 12345.0 * random.random() if start is None else start

    def __call__(self):
        return self.t


def about(x):
    return pytest.approx(x, rel=1e-9, abs=1e-7)


def spend(clock, time, phase, seconds):
    clock.enter(phase)
    time.t += seconds


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.tuples(st.sampled_from(PHASES), SECONDS), max_size=30), allowance=SECONDS)
def test_phases_add_up_to_the_whole_time_and_startup_beyond_the_allowance_is_charged(parts, allowance):
    time = FakeTime()
    begin = time.t
    clock = BudgetClock(100.0, allowance, now=time)
    spent = dict.fromkeys(PHASES, 0.0)
    for phase, seconds in parts:
        before = clock.charged()
        spend(clock, time, phase, seconds)
        spent[phase] += seconds
        assert clock.phases() == about(spent)  # in the middle of a phase too
        assert sum(clock.phases().values()) == about(clock.total()) == about(time.t - begin)
        assert clock.charged() >= before - 1e-7
    charged = sum(spent[p] for p in ("data", "step", "checkpoint")) + max(0.0, spent["startup"] - allowance)
    assert clock.charged() == about(charged)
    assert clock.progress() == about(min(1.0, charged / 100.0))
    assert CHARGED == ("data", "step", "checkpoint")


def test_startup_begins_at_launch():
    time = FakeTime(100.0)
    clock = BudgetClock(60.0, 5.0, now=time, started=92.0)  # 8 seconds of imports before
    assert clock.total() == about(8) and clock.charged() == about(3)
    time.t += 2
    assert clock.phases()["startup"] == about(10) and clock.charged() == about(5)
    spend(clock, time, "eval", 1000)
    assert clock.charged() == about(5) and clock.total() == about(1010)


def test_the_real_clock_is_monotonic_and_runs():
    clock = BudgetClock(60.0, 0.0)
    readings = [clock.charged() for _ in range(1000)]
    assert readings == sorted(readings) and readings[-1] > 0


def test_a_budget_of_zero_has_no_progress():
    time = FakeTime()
    clock = BudgetClock(0.0, 0.0, now=time)
    spend(clock, time, "step", 5)
    assert clock.progress() == 0.0


def handed_over(clock):
    """What a checkpoint keeps of a clock for the one of the resumed run: see `save` in train.py."""
    return clock.charged()


def test_a_resumed_run_goes_on_where_the_charged_time_was():
    time = FakeTime()
    first = BudgetClock(300.0, 10.0, now=time)
    spend(first, time, "startup", 8)
    spend(first, time, "step", 70)
    spend(first, time, "eval", 33)
    first.enter("data")
    second = BudgetClock(300.0, 10.0, now=time, earlier=handed_over(first))
    assert second.charged() == about(first.charged()) == about(70)
    spend(second, time, "startup", 4)  # its own start-up is free again
    assert second.charged() == about(70)
    spend(second, time, "step", 5)
    assert second.charged() == about(75) and second.progress() == about(0.25)


def test_startup_beyond_the_allowance_stays_charged_after_a_resume():
    time = FakeTime()
    first = BudgetClock(300.0, 10.0, now=time)
    spend(first, time, "startup", 50)
    spend(first, time, "step", 20)
    first.enter("data")
    assert first.charged() == about(60)
    assert BudgetClock(300.0, 10.0, now=time, earlier=handed_over(first)).charged() == about(60)


def test_resuming_twice_forgets_nothing():
    time = FakeTime()
    charged, earlier = 0.0, 0.0
    for part in (100, 80, 60, 40):
        clock = BudgetClock(300.0, 10.0, now=time, earlier=earlier)
        assert clock.charged() == about(charged)
        spend(clock, time, "step", part)
        clock.enter("checkpoint")
        charged, earlier = charged + part, handed_over(clock)
        assert clock.charged() == about(charged)


# ---------------------------------------------------------------------------------------------------- the stop


def train(clock, time, lengths, reserve, data=0.0):
    """The loop of train.py: steps of these lengths while they fit, then what the reserve is for. Returns steps."""
    steps = 0
    for length in lengths:
        clock.enter("data")
        clock.step_begins()
        if not clock.fits(reserve):
            break
        time.t += data
        spend(clock, time, "step", length)
        steps += 1
    spend(clock, time, "checkpoint", reserve)
    clock.enter("eval")
    return steps


@settings(max_examples=100, deadline=None)
@given(
    usual=st.floats(0.01, 3),
    spread=st.floats(1, 2),
    reserve=st.floats(0, 5),
    data=st.floats(0, 0.5),
    seed=st.integers(0),
)
def test_no_step_overshoots_while_none_is_longer_than_the_worst_seen(usual, spread, reserve, data, seed):
    time, rng = FakeTime(), random.Random(seed)
    budget = 20.0 + reserve
    clock = BudgetClock(budget, 0.0, now=time)
    worst = usual * spread  # seen at the begin and again and again
    lengths = [worst if i % 20 == 0 else rng.uniform(usual, worst) for i in range(5000)]
    train(clock, time, lengths, reserve, data)
    assert clock.charged() <= budget + 1e-6
    assert clock.charged() >= budget - 2 * (worst + data) - 1e-6  # and little is left over


def test_steady_steps_fill_the_budget():
    time = FakeTime()
    clock = BudgetClock(10.0, 0.0, now=time)
    assert train(clock, time, [0.25] * 1000, 1.0) == 36
    assert clock.charged() == about(10)


@pytest.mark.parametrize("budget", range(48, 60))
def test_regularly_slow_steps_do_not_overshoot(budget):
    """Every tenth step logs, collects garbage, copies the weights ... and takes three times as long."""
    time = FakeTime()
    clock = BudgetClock(budget, 0.0, now=time)
    train(clock, time, [3.0 if i % 10 == 0 else 1.0 for i in range(1000)], 1.0)
    assert clock.charged() <= budget + 1e-6


def test_a_single_stall_ends_no_run():
    time = FakeTime()
    clock = BudgetClock(200.0, 0.0, now=time)
    train(clock, time, [60.0 if i == 100 else 1.0 for i in range(1000)], 1.0)
    assert clock.charged() >= 200.0 - 3.0


def test_evaluation_is_no_part_of_a_step():
    time = FakeTime()
    clock = BudgetClock(100.0, 0.0, now=time)
    for _ in range(5):
        clock.enter("data")
        clock.step_begins()
        spend(clock, time, "eval", 50)
        spend(clock, time, "data", 0.5)
        spend(clock, time, "step", 1)
    clock.enter("data")
    clock.step_begins()
    assert clock.next_step() == about(1.5) and clock.charged() == about(7.5)


def test_fits_counts_a_larger_step_by_its_size():
    time = FakeTime()
    clock = BudgetClock(10.0, 0.0, now=time)
    assert clock.next_step() == 0.0
    for _ in range(4):
        clock.enter("step")
        clock.step_begins()
        time.t += 1
    clock.step_begins()  # 4 charged, steps of 1
    assert clock.fits(5.0) and not clock.fits(5.01)
    assert clock.fits(4.0, size=2.0) and not clock.fits(4.01, size=2.0)


def test_a_batch_that_grows_is_foreseen():
    """Batch warm-up: from the first full batch on, steps take as many times longer as the batch is larger."""
    time = FakeTime()
    clock = BudgetClock(20.0, 0.0, now=time)
    for size, length in [(0.25, 0.5)] * 10 + [(0.5, 1.0)] * 5:
        clock.enter("data")
        clock.step_begins(size)
        spend(clock, time, "step", length)
    clock.enter("data")
    clock.step_begins(1.0)  # 10 charged
    assert clock.fits(8.0, 1.0) and not clock.fits(8.01, 1.0)
    assert clock.fits(9.0, 0.5) and not clock.fits(9.01, 0.5)


def test_the_first_charged_step_is_as_long_as_expected():
    time = FakeTime()
    clock = BudgetClock(10.0, 0.0, now=time)
    clock.expect(3.0)
    clock.step_begins()
    assert clock.fits(7.0) and not clock.fits(7.01)


def test_nothing_fits_when_the_allowance_has_eaten_the_budget():
    time = FakeTime()
    clock = BudgetClock(10.0, 5.0, now=time)
    time.t += 14
    assert clock.fits(1.0)
    time.t += 0.5
    assert not clock.fits(1.0)


# ---------------------------------------------------------------------------------------------------- schedules


@settings(max_examples=200, deadline=None)
@given(
    step=st.integers(0, 10**6),
    progress=SHARE,
    warmup=st.sampled_from([0, 1, 2, 100, 10**9]),
    cooldown=st.sampled_from([0.0, 1e-9, 0.3, 1.0]),
    final=SHARE,
)
def test_learning_rate_is_a_share_and_never_rises_in_the_cooldown(step, progress, warmup, cooldown, final):
    now = learning_rate(step, progress, warmup, cooldown, final)
    assert 0 <= now <= 1 and math.isfinite(now)
    later = learning_rate(step, min(1.0, progress + 0.01), warmup, cooldown, final)
    assert later <= now + 1e-12
    assert learning_rate(step + 1, progress, warmup, cooldown, final) >= now
    if step + 1 >= warmup:
        assert now >= final - 1e-12
        if progress <= 1 - cooldown - 1e-9 or cooldown == 0:
            assert now == pytest.approx(1.0)


@pytest.mark.parametrize(
    "step, progress, warmup, cooldown, final, expected",
    [
        (0, 0.0, 0, 0.0, 0.05, 1.0),
        (0, 1.0, 0, 0.0, 0.05, 1.0),
        (0, 0.0, 0, 1.0, 0.05, 1.0),
        (9, 1.0, 0, 1.0, 0.05, 0.05),
        (9, 1.0, 0, 0.6, 0.0, 0.0),
        (9, 0.5, 0, 1.0, 0.0, 0.5),
        (9, 0.7, 0, 0.6, 0.0, 0.5),
        (9, 0.4, 0, 0.6, 0.0, 1.0),
        (9, 0.7, 0, 0.6, 1.0, 1.0),
        (9, 0.7, 0, 0.6, 0.2, 0.6),
        (0, 0.0, 4, 0.6, 0.0, 0.25),
        (3, 0.0, 4, 0.6, 0.0, 1.0),
        (0, 0.0, 1, 0.6, 0.0, 1.0),
        (1, 0.7, 4, 0.6, 0.0, 0.25),  # both at once
        (5, 1.5, 0, 0.6, 0.05, 0.05),  # beyond the end
    ],
)
def test_learning_rate_values(step, progress, warmup, cooldown, final, expected):
    assert learning_rate(step, progress, warmup, cooldown, final) == pytest.approx(expected)


@pytest.mark.parametrize(
    "step, progress, warmup, cooldown, expected",
    [
        (0, 0.0, 300, 0.6, 0.85),
        (150, 0.0, 300, 0.6, 0.90),
        (300, 0.0, 300, 0.6, 0.95),
        (9999, 0.4, 300, 0.6, 0.95),
        (9999, 0.7, 300, 0.6, 0.85),
        (9999, 1.0, 300, 0.6, 0.75),
        (0, 1.0, 300, 0.6, 0.75),
        (0, 0.0, 0, 0.6, 0.95),
        (0, 0.0, 0, 0.0, 0.95),
        (0, 1.0, 0, 0.0, 0.95),
        (0, 0.0, 0, 1.0, 0.95),
        (0, 0.5, 0, 1.0, 0.85),
        (0, 1.0, 0, 1.0, 0.75),
    ],
)
def test_muon_momentum_values(step, progress, warmup, cooldown, expected):
    assert muon_momentum(step, progress, 0.95, warmup, cooldown, 0.75) == pytest.approx(expected)


@given(
    step=st.integers(0, 10**6),
    progress=SHARE,
    warmup=st.integers(0, 1000),
    cooldown=SHARE,
    peak=st.floats(0, 0.9999),
    final=st.floats(0, 0.9999),
)
def test_muon_momentum_stays_between_its_ends(step, progress, warmup, cooldown, peak, final):
    found = muon_momentum(step, progress, peak, warmup, cooldown, final)
    assert min(0.85, peak, final) - 1e-12 <= found <= max(0.85, peak, final) + 1e-12


@pytest.mark.parametrize(
    "progress, phases, expected",
    [
        (0.0, [], 1.0),
        (1.0, [], 1.0),
        (0.0, [[0.1, 0.25], [0.4, 0.5]], 0.25),
        (0.0999, [[0.1, 0.25], [0.4, 0.5]], 0.25),
        (0.1, [[0.1, 0.25], [0.4, 0.5]], 0.5),
        (0.4, [[0.1, 0.25], [0.4, 0.5]], 1.0),
        (1.0, [[0.1, 0.25], [0.4, 0.5]], 1.0),
        (0.999, [[1.0, 0.5]], 0.5),
    ],
)
def test_batch_share(progress, phases, expected):
    assert batch_share(progress, phases) == expected

"""The budget's clock and the schedules that follow it: pure pieces, no torch.

Wall-clock time is split into phases; some are charged to the budget, some are not:
    startup     launch to the end of the last start-up step (compilation): free up to an allowance
    data, step, checkpoint      charged
    eval        not charged (it has a cap of its own)
The phases add up to the whole time, since a phase ends only where the next begins.
"""

import statistics
import time
from collections import deque

CHARGED = ("data", "step", "checkpoint")


class BudgetClock:
    """Accounts the time of a run to phases and says whether another step fits into the budget.

    seconds: the budget; allowance: start-up seconds that are free; now: a clock that never goes back
    (seconds), for tests. Starts in phase "startup"; `earlier` is what was charged to the run being resumed.
    """

    def __init__(self, seconds, allowance, now=time.monotonic, started=None, earlier=0.0):
        self.seconds, self.allowance, self.now = seconds, allowance, now
        self.spent = {"startup": 0.0, "data": 0.0, "step": 0.0, "checkpoint": 0.0, "eval": 0.0}
        self.earlier = earlier
        self.phase, self.since = "startup", now() if started is None else started
        self.recent = deque(maxlen=50)  # seconds of a step of size 1: from its begin to the begin of the next
        self.mark = None  # charged seconds when the running step began, and its size

    def enter(self, phase):
        """End the running phase, begin another."""
        t = self.now()
        self.spent[self.phase] += t - self.since
        self.phase, self.since = phase, t

    def phases(self):
        """Seconds of each phase so far."""
        spent = dict(self.spent)
        spent[self.phase] += self.now() - self.since
        return spent

    def total(self):
        """Seconds since launch."""
        return sum(self.phases().values())

    def charged(self):
        """Seconds charged so far, of earlier parts of a resumed run too."""
        spent = self.phases()
        free = min(spent["startup"], self.allowance)
        return self.earlier + sum(spent[phase] for phase in CHARGED) + spent["startup"] - free

    def progress(self):
        """Share of the budget that is charged, 0 to 1."""
        return min(1.0, self.charged() / self.seconds) if self.seconds > 0 else 0.0

    def step_begins(self, size=1.0):
        """Note that a charged step begins here, with this share of the full batch: what was charged since the
        last call is the length of a step."""
        charged = self.charged()
        if self.mark is not None:
            self.expect((charged - self.mark[0]) / self.mark[1])
        self.mark = charged, size

    def expect(self, seconds):
        """Count `seconds` among the lengths that full steps had lately."""
        self.recent.append(seconds)

    def next_step(self):
        """Upper estimate of the next full step, seconds: the worst of the last 20, but a single stall counts at
        most twice the median of the last 50, so that it can not end a run early."""
        if not self.recent:
            return 0.0
        second_worst = sorted(self.recent)[-2:][0]
        return min(max(list(self.recent)[-20:]), max(2 * statistics.median(self.recent), second_worst))

    def fits(self, reserve, size=1.0):
        """Whether another step, with this share of the full batch, leaves `reserve` seconds."""
        return self.charged() + size * self.next_step() + reserve <= self.seconds


def learning_rate(step, progress, warmup_steps, cooldown, final):
    """Factor on the learning rates: linear rise over warmup_steps, flat, linear fall to `final` over the last
    `cooldown` share of the budget. step from 0; progress: share of the budget gone, 0 to 1."""
    rise = min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else 1.0
    left = min(1.0, (1.0 - progress) / cooldown) if cooldown > 0 else 1.0
    return rise * (final + (1.0 - final) * max(0.0, left))


def muon_momentum(step, progress, peak, warmup_steps, cooldown, final, start=0.85):
    """Muon's momentum: linear from `start` to `peak` over warmup_steps, linear to `final` in the cooldown."""
    rise = min(1.0, step / warmup_steps) if warmup_steps > 0 else 1.0
    fall = max(0.0, 1.0 - (1.0 - progress) / cooldown) if cooldown > 0 else 0.0
    return (start + (peak - start) * rise) * (1 - fall) + final * fall


def batch_share(progress, phases):
    """Share of the full batch at this point: phases [[until, share], ...] with `until` rising, 1 afterwards."""
    for until, share in phases:
        if progress < until:
            return share
    return 1.0

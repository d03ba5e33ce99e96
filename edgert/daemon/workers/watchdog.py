"""Limits the run time and memory of the worker that serves: it is killed or replaced.

`daemon/model/model_service.py` starts the next worker: after a kill with the pauses of `crashes.py`, as a replacement at
once.
"""

from __future__ import annotations

from edgert.config import ServingConfig
from edgert.daemon.workers.worker_process import WorkerProcess
from edgert.errors import EngineFailed

CHECK_S_MAX = 30.0  # between checks of a worker; the length of a run is exact all the same
MEMORY_CHECK_S = 2.0  # while a worker's memory is limited
MEMORY_HARD_SHARE = 1.25  # of the limit: a worker beyond it is killed instead of replaced
RECYCLE_PAUSE_S = 60.0


class Watchdog:
    """Watches one model's workers in turn; the next check is due at `due_s` of the supervisor's clock."""

    def __init__(self, config: ServingConfig) -> None:
        self.due_s: float | None = None
        self._config = config
        self._run_s_max = config.run_s_max or float("inf")
        self._recycled_at_s: float | None = None

    def plan(self, worker: WorkerProcess | None, now_s: float) -> None:
        """Set the next check, at a multiple of the period, so that many models cost one wake-up."""
        if worker is None:
            self.due_s = None
            return
        period_s = min(self._run_s_max, CHECK_S_MAX, MEMORY_CHECK_S if self._config.worker_mb_max else CHECK_S_MAX)
        self.due_s = (now_s // period_s + 1) * period_s
        since = worker.page.running_since_s()
        if since is not None and worker.killed_at_s is None:
            self.due_s = max(now_s, min(self.due_s, since + self._run_s_max)) + 0.001

    def check(self, worker: WorkerProcess, now_s: float) -> bool:
        """Kill a worker that is beyond its limits; return whether its memory calls for a replacement."""
        if self._runs_too_long(worker, now_s):
            return False
        limit_mb = self._config.worker_mb_max
        if not limit_mb or worker.measure() <= limit_mb:
            return False
        if worker.mb > limit_mb * MEMORY_HARD_SHARE:
            worker.kill(now_s, EngineFailed(f"the worker took {worker.mb:.0f} MB; {limit_mb:g} MB are allowed"))
            return False
        return self._recycled_at_s is None or now_s - self._recycled_at_s > RECYCLE_PAUSE_S

    def recycled(self, now_s: float) -> None:
        """Note that a replacement loads: the next one comes after a pause."""
        self._recycled_at_s = now_s

    def _runs_too_long(self, worker: WorkerProcess, now_s: float) -> bool:
        since = worker.page.running_since_s()
        if since is None or now_s - since <= self._run_s_max or worker.page.running_since_s() != since:
            return False
        worker.kill(now_s, EngineFailed(f"an engine run took longer than {self._config.run_s_max:g} s, its limit"))
        return True

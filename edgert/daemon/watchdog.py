"""Looking after the worker that serves: no engine run lasts for ever, and its memory stays within its limit."""

from __future__ import annotations

from edgert.config import ServingConfig
from edgert.daemon.worker_process import WorkerProcess
from edgert.errors import EngineFailed

LOOK_S_MAX = 30.0  # between two looks at a worker; runs are timed exactly all the same
MEMORY_LOOK_S = 2.0  # where a worker's memory is limited
MEMORY_HARD_SHARE = 1.25  # of the limit: from here the worker is killed, not replaced
RECYCLE_PAUSE_S = 60.0


class Watchdog:
    """Of one model's workers, one after the other. `due_s` is when to look next, on the supervisor's clock."""

    def __init__(self, config: ServingConfig) -> None:
        self.due_s: float | None = None
        self._config = config
        self._run_s_max = config.run_s_max or float("inf")
        self._recycled_at_s: float | None = None

    def plan(self, worker: WorkerProcess | None, now_s: float) -> None:
        """Set the next look. The times are multiples of the period, so that many models cost one waking."""
        if worker is None:
            self.due_s = None
            return
        period_s = min(self._run_s_max, LOOK_S_MAX, MEMORY_LOOK_S if self._config.worker_mb_max else LOOK_S_MAX)
        self.due_s = (now_s // period_s + 1) * period_s
        since = worker.page.running_since_s()
        if since is not None and worker.killed_at_s is None:
            self.due_s = max(now_s, min(self.due_s, since + self._run_s_max)) + 0.001

    def look(self, worker: WorkerProcess, now_s: float) -> bool:
        """Kill a worker that is beyond its limits. Whether it has outgrown its memory so far that another is to
        take its place.
        """
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
        """Another worker is on its way up: the one that serves is not replaced again so soon."""
        self._recycled_at_s = now_s

    def _runs_too_long(self, worker: WorkerProcess, now_s: float) -> bool:
        since = worker.page.running_since_s()
        if since is None or now_s - since <= self._run_s_max or worker.page.running_since_s() != since:
            return False
        worker.kill(now_s, EngineFailed(f"an engine run took longer than {self._config.run_s_max:g} s, its limit"))
        return True

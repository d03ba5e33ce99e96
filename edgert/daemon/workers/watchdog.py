"""Kills or replaces the worker that serves if a run, its silence or its memory exceeds a limit.

A worker may also hang outside an engine run, for example because its process was stopped. An idle worker must not wake
up to prove that it works. So the watchdog asks only a worker that has not read the daemon's last message, such as the
connection of a client.

`edgert/daemon/model/` starts the next worker: after a kill by the rules of `restarts.py`, or at once as a replacement.
"""

from __future__ import annotations

from collections.abc import Callable

from edgert.config import ServingConfig
from edgert.daemon.workers.worker_process import WorkerProcess
from edgert.daemon.workers.worker_set import CHECK_S_MAX, LATE_S_MAX, WorkerSet
from edgert.errors import EngineFailed

MEMORY_CHECK_S = 2.0  # the longest time between two checks if a worker's memory is limited
MEMORY_HARD_SHARE = 1.25  # a worker beyond this multiple of its memory limit is killed, not replaced
RECYCLE_PAUSE_S = 60.0
SILENT_S_MAX = 120.0  # longer than a slow disk or a full memory delays an answer


class Watchdog:
    """Watches the worker of `workers` that serves. `replace` returns whether it started a replacement."""

    def __init__(
        self,
        config: ServingConfig,
        workers: WorkerSet,
        clock: Callable[[], float],
        replace: Callable[[WorkerProcess], bool],
    ) -> None:
        self.limit_mb = config.worker_mb_max
        self._run_s_max = config.run_s_max or float("inf")
        self._workers = workers
        self._clock = clock
        self._replace = replace
        self._due_s = 0.0
        self._resumed_at_s = 0.0  # the end of the last pause; the time of a run starts again then
        self._replaced_at_s: float | None = None

    def plan(self) -> None:
        """Plan the next check at a multiple of the period, so that many models share one wake-up."""
        now_s, worker = self._clock(), self._workers.serving
        if worker is None:
            return
        period_s = min(self._run_s_max, CHECK_S_MAX, MEMORY_CHECK_S if self.limit_mb else CHECK_S_MAX)
        self._due_s = (now_s // period_s + 1) * period_s
        since = worker.page.running_since_s()
        if since is not None and worker.killed_at_s is None:
            ends_at_s = max(since, self._resumed_at_s) + self._run_s_max
            self._due_s = max(now_s, min(self._due_s, ends_at_s)) + 0.001

    def tick(self) -> None:
        """Check the worker that serves, if a check is due."""
        now_s, worker = self._clock(), self._workers.serving
        if worker is None or now_s < self._due_s:
            return
        if now_s - self._due_s > LATE_S_MAX:
            self._resumed_at_s = now_s
        if self._needs_replacement(worker, now_s) and self._workers.loading is None and self._replace(worker):
            self._replaced_at_s = now_s
        self.plan()

    def due_s(self) -> float | None:
        """Return the time when `tick` is due, on the clock; None if no worker serves."""
        return None if self._workers.serving is None else self._due_s

    def _needs_replacement(self, worker: WorkerProcess, now_s: float) -> bool:
        """Kill a worker that is stuck or far beyond its memory limit; return whether it needs a replacement."""
        if (
            self._runs_too_long(worker, now_s)
            or self._is_silent(worker, now_s)
            or not self.limit_mb
            or worker.measure() <= self.limit_mb
        ):
            return False
        if worker.mb > self.limit_mb * MEMORY_HARD_SHARE:
            message = (
                f"the worker used {worker.mb:.0f} MB, more than {MEMORY_HARD_SHARE:g} times its limit of "
                f"{self.limit_mb:g} MB, so the daemon killed it: use a smaller model, or raise [serving] worker_mb_max"
            )
            worker.kill(now_s, EngineFailed(message))
            return False
        return self._replaced_at_s is None or now_s - self._replaced_at_s > RECYCLE_PAUSE_S

    def _runs_too_long(self, worker: WorkerProcess, now_s: float) -> bool:
        since = worker.page.running_since_s()
        if since is None or now_s - max(since, self._resumed_at_s) <= self._run_s_max:
            return False
        if worker.page.running_since_s() != since:  # the run has just ended
            return False
        message = (
            f"an engine run exceeded its limit of {self._run_s_max:g} s, so the daemon killed the worker: "
            "use a faster model, or raise [serving] run_s_max"
        )
        worker.kill(now_s, EngineFailed(message))
        return True

    def _is_silent(self, worker: WorkerProcess, now_s: float) -> bool:
        if worker.asked_s is None:
            if worker.has_unread:
                worker.ask(now_s)
            return False
        # An engine may hold Python's lock; `run_s_max` limits this time.
        running = worker.page.running_since_s() is not None
        if running or now_s - max(worker.asked_s, self._resumed_at_s) <= SILENT_S_MAX:
            return False
        worker.kill(now_s, EngineFailed(f"the worker did not react for {SILENT_S_MAX:.0f} s, so the daemon killed it"))
        return True

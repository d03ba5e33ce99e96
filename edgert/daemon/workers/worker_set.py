"""The workers of one model: the worker that serves, the worker that loads, and workers that end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from edgert.daemon.workers.worker_process import WorkerProcess
from edgert.errors import EngineFailed
from edgert.versions.slots import Version
from edgert.worker_link.load_message import LoadMessage

STUCK_S = 10.0  # a worker that still runs this long after its kill is stuck
CHECK_S_MAX = 30.0  # the longest time between two checks of workers
LATE_S_MAX = 5.0  # if a check is later than this, daemon and workers were paused, as by `docker pause`

StartWorker = Callable[[LoadMessage, Version, float], WorkerProcess]


class WorkerSet:
    """Starts, switches and ends workers. `clock` is monotonic seconds, like the clock of the run pages."""

    def __init__(self, clock: Callable[[], float], start: StartWorker) -> None:
        self.serving: WorkerProcess | None = None
        self.loading: WorkerProcess | None = None
        self._ending: list[WorkerProcess] = []
        self._clock = clock
        self._start = start
        self._checked_s = 0.0

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter([worker for worker in (self.serving, self.loading, *self._ending) if worker is not None])

    def start(self, load_message: LoadMessage, version: Version) -> WorkerProcess:
        """Start a worker that loads `version`. Raises OSError."""
        self._checked_s = self._clock()
        self.loading = self._start(load_message, version, self._clock())
        return self.loading

    def switch(self) -> None:
        """Let the worker that loaded serve, and end the worker that served."""
        self.stop_serving()
        worker, self.loading = self.loading, None
        assert worker is not None  # the caller has received its message
        worker.serves_since_s = worker.connected_at_s = self._clock()
        self.serving = worker

    def stop_serving(self, *, final: bool = False) -> None:
        """Tell the worker that serves to finish its requests and end. `final` means that the daemon stops."""
        if self.serving is not None:
            self._checked_s = self._clock()
            self.serving.stop(final=final, now_s=self._clock())
            self._ending.append(self.serving)
            self.serving = None

    def kill_loading(self) -> None:
        if self.loading is not None:
            self.loading.kill(self._clock())
            self._ending.append(self.loading)
            self.loading = None

    def remove(self, worker: WorkerProcess) -> bool:
        """Remove a worker whose process has ended; return whether this end was unexpected."""
        if worker is self.serving:
            self.serving = None
        elif worker is self.loading:
            self.loading = None
        else:
            self._ending.remove(worker)
            return False
        return True

    def tick(self) -> None:
        """Kill each worker that takes too long to load or to end."""
        now_s, due_s, loading = self._clock(), self.due_s(), self.loading
        if due_s is not None and now_s - due_s > LATE_S_MAX:
            self._extend_limits(now_s - self._checked_s)  # nothing shows when the pause began
        self._checked_s = now_s
        if loading is not None and now_s > loading.started_s + loading.load_s_max:
            message = f"release {loading.version.release} did not load within {loading.load_s_max:.0f} s, its limit"
            loading.kill(now_s, EngineFailed(message))
        for worker in self._ending:
            if worker.stop_by_s is not None and now_s > worker.stop_by_s:
                worker.kill(now_s)

    def due_s(self) -> float | None:
        """Return the time when `tick` is due, on the clock; None if nothing is due."""
        alive = [worker for worker in self._ending if not worker.killed_at_s]
        times = [worker.stop_by_s for worker in alive if worker.stop_by_s is not None]
        if self.loading is not None and not self.loading.killed_at_s:
            times.append(self.loading.started_s + self.loading.load_s_max)
        return min([*times, self._checked_s + CHECK_S_MAX]) if times else None

    def _extend_limits(self, pause_s: float) -> None:
        """Extend the time limits of all workers, because no process ran for `pause_s`."""
        if self.loading is not None:
            self.loading.started_s += pause_s
        for worker in self._ending:
            if worker.stop_by_s is not None:
                worker.stop_by_s += pause_s

    @property
    def busy(self) -> bool:
        """Whether an engine run is in progress."""
        return any(worker.page.running_since_s() is not None for worker in self)

    @property
    def stuck(self) -> bool:
        """Whether a worker still runs after its kill. The daemon cannot end such a worker."""
        now_s = self._clock()
        return any(worker.killed_at_s is not None and now_s - worker.killed_at_s > STUCK_S for worker in self)

"""Threads that wait for another job: the jobs that they take, and their end."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

from edgert.worker.connections.spare_threads import SpareThreads
from tests.support.devices import WAIT_S_MAX, wait_until


def ran_in(threads: SpareThreads) -> int:
    """Run a job; return the thread that ran it."""
    done, found = threading.Event(), list[int]()

    def job(number: str) -> None:
        found.append(threading.get_native_id())
        assert number == "given"
        done.set()

    threads.start(job, "given")
    assert done.wait(WAIT_S_MAX)
    return found[0]


def test_a_thread_whose_job_ended_takes_the_next_job() -> None:
    threads = SpareThreads(spare_s=2 * WAIT_S_MAX)
    first = ran_in(threads)
    wait_until(lambda: len(threads) == 1, "the thread waits")
    assert ran_in(threads) == first


def test_simultaneous_jobs_have_separate_threads() -> None:
    threads, both = SpareThreads(), threading.Barrier(3)
    for _ in range(2):
        threads.start(both.wait, WAIT_S_MAX)
    both.wait(WAIT_S_MAX)


def test_a_thread_that_gets_no_job_ends() -> None:
    for threads in (SpareThreads(spare_max=0), SpareThreads(spare_s=0.01)):
        task = Path(f"/proc/self/task/{ran_in(threads)}")
        wait_until(partial(_is_gone, task), "the thread has ended")
        assert len(threads) == 0


def _is_gone(path: Path) -> bool:
    return not path.exists()


def test_a_job_that_arrives_while_a_thread_gives_up_waiting_is_not_lost() -> None:
    threads = SpareThreads(spare_s=0.0005)
    for _ in range(300):
        ran_in(threads)
        threading.Event().wait(0.0005)

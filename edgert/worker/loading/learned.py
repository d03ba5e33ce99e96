"""The measured settings of one artifact on this device, and the file that stores them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgert.config import ServingConfig
from edgert.durable import replace_file
from edgert.engines import threads_to_try
from edgert.state_dir import LEARNED_NAME_CHARS
from edgert.typed_json import json_bytes, read_json
from edgert.worker_link.run_page import SESSIONS_MAX

FORMAT = 6
OTHER_WORK_SHARE_MAX = 0.25  # the share of the processors that other work may take before the figures are doubted
MEASUREMENTS_MAX = 3


@dataclass(frozen=True)
class Learned:
    """The measured settings for an artifact on this device.

    Attributes:
        instances: The number of parallel runs. If the engine is `concurrent`, all runs share one session; otherwise,
            each run has its own session.
        batch_cap: The largest number of items in one run.
        reactor_session: Whether requests of the reactor run on a session of their own, with one thread.
        threads_us: The time of one item in µs, by the number of threads.
        run_us: The time of a batch in µs, by its size.
        others: The share of the processors that other work took during the measurement.
    """

    threads: int
    instances: int = 1
    batch_cap: int = 1
    reactor_session: bool = False
    threads_us: dict[str, float] = field(default_factory=dict)
    run_us: dict[str, float] = field(default_factory=dict)
    took_s: float = 0.0
    others: float = 0.0
    measured: int = 1

    @property
    def doubtful(self) -> bool:
        """Whether the next load of the model must measure again."""
        return self.others > OTHER_WORK_SHARE_MAX and self.measured < MEASUREMENTS_MAX

    def less_disturbed(self, again: Learned) -> Learned:
        """Return the result with less other work: this result or `again`."""
        return replace(min(self, again, key=lambda one: one.others), measured=self.measured + 1)


@dataclass(frozen=True)
class Circumstances:
    """The conditions of a measurement, besides the artifact. Under other conditions, it is not valid.

    `threads`, `instances` and `batch_max` are the configured values; 0 means that the value is measured. `reactor`
    tells whether the reactor may serve the model.
    """

    engine: str
    engine_version: str
    cpus: int
    optimize_for: str
    threads: int
    instances: int
    batch_max: int
    reactor: bool = False
    format: int = FORMAT

    @classmethod
    def of(cls, engine: str, engine_version: str, settings: ServingConfig, *, reactor: bool = False) -> Circumstances:
        """Return the present circumstances on this machine."""
        given = (settings.optimize_for, settings.threads, settings.instances, settings.batch_max)
        return cls(engine, engine_version, len(os.sched_getaffinity(0)), *given, reactor)

    @property
    def threads_to_try(self) -> tuple[int, ...]:
        """The numbers of threads to measure, ascending."""
        return (self.threads,) if self.threads else threads_to_try(self.engine, self.cpus)


@dataclass(frozen=True)
class _Content:
    circumstances: Circumstances
    learned: Learned


class LearnedFile:
    """The file with the learned settings of one artifact; `folder` is the state's `learned/`."""

    def __init__(self, folder: Path, artifact_sha256: str) -> None:
        self._path = folder / f"{artifact_sha256[:LEARNED_NAME_CHARS]}.json"

    def read(self, circumstances: Circumstances) -> Learned | None:
        """Return the settings learned under these conditions; None if they are missing or the file is damaged."""
        content = read_json(_Content, self._path)
        if content is None or content.circumstances != circumstances:
            return None
        learned = content.learned
        counts = (learned.threads, learned.instances, learned.batch_cap)
        runs = learned.instances * (2 if learned.reactor_session else 1)
        return learned if all(1 <= count <= 4096 for count in counts) and runs <= SESSIONS_MAX else None

    def write(self, circumstances: Circumstances, learned: Learned) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, json_bytes(_Content(circumstances, learned)), durable=False, shared=True)
        except OSError:
            pass  # with a full disk, the next load measures again

"""The cost of a large request's memory: new or kept buffers, and an input outside the caches.

- **Buffers** (1 to 16 MB): processor time of a copy into a memory map. The map is kept or new. A new map is shared,
  which is Python's default, or private, or private with huge pages if the kernel has some.
- **Inputs** (MobileNetV2 in FP32 on ONNX Runtime, one thread, 600 KB for each item, 32 clients): processor time of a
  copy and a run. All clients share one buffer, or each has its own buffer. The input is copied into an own buffer just
  before its run, or 31 runs before it.

No daemon takes part. Each time is the median over the rounds, in which all cases take turns.

    python -m bench.buffers
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.support.architectures import item_shape, mobilenet_v2, samples
from bench.support.tables import emit

SIZES_MB = (1, 2, 4, 8, 16)
CLIENTS, ROUNDS = 32, 9
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
COLUMNS = ("what", "case", "cpu_us", "of_first")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    options = parser.parse_args()
    emit([row for size_mb in SIZES_MB for row in buffers(size_mb)] + inputs(), COLUMNS, options.json)


def buffers(size_mb: int) -> list[dict[str, Any]]:
    """Return a row for each kind of buffer of `size_mb` MiB."""
    body = memoryview(bytes(size_mb * 1024**2))
    kept = mmap.mmap(-1, len(body))

    def copied_into(room: mmap.mmap, advice: int | None = None) -> None:
        if advice is not None:
            room.madvise(advice)
        memoryview(room)[:] = body

    cases = {
        "kept": lambda: copied_into(kept),
        "new": lambda: copied_into(mmap.mmap(-1, len(body))),
        "new, private": lambda: copied_into(mmap.mmap(-1, len(body), PRIVATE)),
        "new, private, huge pages": lambda: copied_into(mmap.mmap(-1, len(body), PRIVATE), mmap.MADV_HUGEPAGE),
    }
    return _rows(f"buffer of {size_mb} MB", cases, 1)


def inputs() -> list[dict[str, Any]]:
    """Return a row for each time at which a request's input is copied."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    proto = mobilenet_v2()
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    sent = samples(item_shape(proto), CLIENTS, 0)[:, None]
    own, shared = sent.copy(), sent[0].copy()

    def run(into: Any, copy_to: Callable[[int], int]) -> Callable[[], None]:
        def each() -> None:
            for i in range(CLIENTS):
                np.copyto(into[copy_to(i)], sent[copy_to(i)])
                session.run(None, {"x": into[i]})

        return each

    cases = {
        "one buffer": run([shared] * CLIENTS, lambda i: i),
        "own buffers, copied late": run(own, lambda i: i),
        "own buffers, copied early": run(own, lambda i: i - 1),  # each copy is used 31 runs later
    }
    return _rows("input of 600 KB", cases, CLIENTS)


def _rows(what: str, cases: Mapping[str, Callable[[], None]], requests: int) -> list[dict[str, Any]]:
    spent_us: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(ROUNDS + 1):  # the first round is not counted
        for case, ask in cases.items():
            before_s = time.process_time()
            ask()
            spent_us[case].append((time.process_time() - before_s) * 1e6 / requests)
    median_us = {case: statistics.median(each[1:]) for case, each in spent_us.items()}
    first_us = next(iter(median_us.values()))
    return [
        {"what": what, "case": case, "cpu_us": round(us, 1), "of_first": f"{us / first_us:.2f}"}
        for case, us in median_us.items()
    ]


if __name__ == "__main__":
    main()

"""Measure hold-out accuracy through the daemon; runs on the device, in the environment that bootstrap made.

python accuracy.py SOCKET holdout.npz  ->  {"accuracy": ..., "p50_ms": ..., "p99_ms": ..., "engine": ...}
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from edgert import Client


def main() -> None:
    with np.load(sys.argv[2]) as samples, Client(sys.argv[1]) as client:
        images, labels = samples["image"], samples["labels"]
        times_ms, right = [], 0
        for image, label in zip(images, labels, strict=True):
            began = time.perf_counter()
            scores = client.infer("digits", image, cache=False)["scores"]
            times_ms.append((time.perf_counter() - began) * 1e3)
            right += int(scores.argmax() == label)
        engine = client.metadata("digits")["engine"]
    p50, p99 = np.percentile(times_ms, [50, 99])
    print(json.dumps({"accuracy": right / len(labels), "p50_ms": float(p50), "p99_ms": float(p99), "engine": engine}))


if __name__ == "__main__":
    main()

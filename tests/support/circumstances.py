"""The circumstances of a load on a machine with four processors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgert.config import ServingConfig
from edgert.worker.loading.learned import Circumstances


def circumstances(**changes: Any) -> Circumstances:
    return replace(Circumstances.of("onnxruntime", "1", ServingConfig()), **{"cpus": 4, **changes})

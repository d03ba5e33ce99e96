"""In which precision an artifact computes each kind of layer, as its file shows it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from edgert_deploy.packager.builders import BUILDERS, builder_for


def layer_precisions(engine: str, path: Path) -> dict[str, dict[str, int]]:
    """Return {kind of layer: {"int8" | "fp16" | "fp32" | another dtype: how many}}, the most frequent kind first.

    Empty for an engine without a builder, and for a file that is not what it should be.
    """
    found: dict[str, Counter[str]] = {}
    try:
        for kind, precision in builder_for(engine).layer_precisions(path) if engine in BUILDERS else ():
            found.setdefault(kind, Counter())[precision] += 1
    except Exception:  # noqa: BLE001 - a file from anywhere, read by four parsers; its content is checked elsewhere
        return {}
    ordered = sorted(found, key=lambda kind: (-sum(found[kind].values()), kind))
    return {kind: dict(found[kind].most_common()) for kind in ordered}

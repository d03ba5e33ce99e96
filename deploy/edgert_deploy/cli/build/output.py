"""Prints the results of `edgert build`: a row for each artifact, times of candidates, or JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from edgert_deploy.cli.shared.output import columns
from edgert_deploy.common.quantities import difference_text, share_text, size_text
from edgert_deploy.packager.candidates.candidate import Candidate
from edgert_deploy.packager.candidates.choice import Choice
from edgert_deploy.packager.pack import BuildResult
from edgert_deploy.packager.request import BuildRequest

WIDTHS = {
    "target": 16,
    "engine": 11,
    "precision": 9,
    "in INT8": 7,
    "size": 19,
    "metric": 14,
    "FP32": 6,
    "artifact": 8,
    "diff": 7,
    "gate": 4,
}
HEADING = "  ".join(name.ljust(width) for name, width in WIDTHS.items()).rstrip()


def rows(choice: Choice, model_bytes: int) -> str:
    """Return a row for each packed artifact of a target, and lines with the candidates that were tried.

    `model_bytes` is the size of the FP32 model.
    """
    lines = []
    for candidate in choice.packed:
        lines.append(_row(choice.profile.name, candidate, model_bytes))
        if tried := choice.tried_text(candidate.artifact.engine):
            best = f"gets {candidate.how}; " if candidate.passed else ""
            lines.append(f"  {candidate.artifact.engine} {best}tried: {tried}")
    if choice.packed[0].result.similarity_only:
        lines.append(
            "  this figure is only the similarity to FP32: give labels in the hold-out, --postprocess or --metric "
            "module:function"
        )
    return "\n".join(lines)


def times(choices: Iterable[Choice]) -> str:
    """Return a table of each measured target's candidates: gate, speed, and whether they were packed."""
    table = [("target", "candidate", "on", "p50 ms", "threads", "gate", "note")]
    for choice in choices:
        packed = [candidate.id for candidate in choice.packed]
        for candidate in choice.tried if choice.timings else ():
            timing = choice.timings.get(candidate.id)
            where, time, threads, note = "-", "-", "-", ""
            if timing is not None:
                where, threads, note = timing.where, str(timing.threads or "-"), timing.error
                time = "-" if timing.error else f"{timing.p50_ms:.4f}"
            elif candidate.id in packed:
                continue
            if candidate.id in packed and not note:
                note = "packed" if packed.index(candidate.id) else "packed first"
            gate = "pass" if candidate.passed else "FAIL"
            table.append((choice.profile.name, candidate.id, where, time, threads, gate, note))
    return columns(table)


def summary(result: BuildResult, request: BuildRequest) -> str:
    """Return the line about the bundle, below a table of times if candidates were timed."""
    timed = any(choice.timings for choice in result.choices)
    downgrade = f" (a downgrade from releases up to {request.downgrade_from})" if request.downgrade_from else ""
    expires = f", expires {request.expires}" if request.expires else ""
    size = size_text(result.size_bytes)
    line = f"{result.path}: {size}, release {request.release}{downgrade}{expires}, signed by {result.key_id}"
    return f"{times(result.choices)}\n{line}" if timed else line


def as_json(result: BuildResult, request: BuildRequest) -> dict[str, Any]:
    return {
        "bundle": str(result.path),
        "size_bytes": result.size_bytes,
        "digest": result.digest,
        "key_id": result.key_id,
        "model": request.model,
        "release": request.release,
        "downgrade_from": request.downgrade_from or None,
        "expires": request.expires or None,
        "warnings": list(result.warnings),
        "targets": targets(result.choices, request),
    }


def targets(choices: Iterable[Choice], request: BuildRequest) -> list[dict[str, Any]]:
    return [_target(choice, request.source.size_bytes) for choice in choices]


def _row(target: str, candidate: Candidate, model_bytes: int) -> str:
    artifact, accuracy = candidate.artifact, candidate.result.accuracy
    cells = (
        target,
        artifact.engine,
        artifact.kind,
        share_text(artifact.int8_share),
        f"{size_text(candidate.size_bytes)} ({size_change(candidate.size_bytes, model_bytes)})",
        accuracy.metric,
        f"{accuracy.fp32:.4f}",
        f"{accuracy.artifact:.4f}",
        difference_text(-accuracy.drop),
        "pass" if candidate.passed else "FAIL",
    )
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS.values(), strict=True)).rstrip()


def size_change(size_bytes: int, source_size_bytes: int) -> str:
    less, more = source_size_bytes / max(size_bytes, 1), size_bytes / max(source_size_bytes, 1)
    return f"{less:.1f}x less" if less >= 1 else f"{more:.1f}x more"


def _target(choice: Choice, source_size_bytes: int) -> dict[str, Any]:
    """Return the target with the fields of its first artifact, and the list of all its artifacts."""
    artifacts = [_artifact(candidate, source_size_bytes) for candidate in choice.packed]
    candidates = [
        {
            "artifact": c.id,
            "recipe": c.recipe,
            "float_layers": list(c.artifact.float_layers),
            "passed": c.passed,
            "score": c.result.accuracy.artifact,
            "drop": c.result.accuracy.drop,
            "size_bytes": c.size_bytes,
            **(vars(choice.timings[c.id]) if c.id in choice.timings else {}),
        }
        for c in choice.tried
    ]
    return {
        "target": choice.profile.name,
        **artifacts[0],
        "artifacts": artifacts,
        "left_out": [vars(entry) for entry in choice.left_out],
        "candidates": candidates,
        "not_built": [vars(entry) for entry in choice.not_built],
    }


def _artifact(candidate: Candidate, source_size_bytes: int) -> dict[str, Any]:
    artifact, accuracy = candidate.artifact, candidate.result.accuracy
    return {
        "artifact": candidate.id,
        "engine": artifact.engine,
        "precision": artifact.kind,
        "recipe": candidate.recipe,
        "float_layers": list(artifact.float_layers),
        "int8_share": artifact.int8_share,
        "size_bytes": candidate.size_bytes,
        "source_size_bytes": source_size_bytes,
        "metric": accuracy.metric,
        "samples": accuracy.samples,
        "fp32": accuracy.fp32,
        "artifact_accuracy": accuracy.artifact,
        "drop": accuracy.drop,
        "max_drop": accuracy.max_drop,
        "judged_by": artifact.judged_by,
        "build_s": round(candidate.build_s, 3),
        "passed": candidate.passed,
    }

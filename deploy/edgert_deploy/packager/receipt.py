"""The receipt: all that a build found out, as one JSON file of the bundle, signed with it.

Devices do not unpack it. The manifest says what a device must know; the receipt says why it is so: every candidate
with its accuracy for each class and slice, its layers in float, its times where it was measured, and what was left
out. It holds no time of day, no path and no duration of the build: the same inputs give the same bytes, but where
candidates were measured.

    {"format": 1, "licence": text, "notes": text,
     "gate": {"metric", "samples", "max_drop", "max_class_drop"},
     "targets": [{"profile", "ladder": [id], "left_out": [{"engine", "code", "reason"}], "remarks": [text],
                  "fallbacks": [{"engine", "layers": [{"name", "op", "sqnr_db"}],
                                 "trials": [{"count", "passed", "drop"}], "spent"}],
                  "times": [{"id", "where", "p50_ms", "p90_ms", "threads", "runs", "engine_version", "error"}]}],
     "candidates": [{"id", "engine", "precision", "kind", "float_layers": [name], "qat", "size_bytes", "judged_by",
                     "tools", "packed", "passed", "accuracy": {"metric", "samples", "fp32", "artifact", "drop"},
                     "also": {name: {"fp32", "artifact"}},
                     "classes": [{"name", "samples", "fp32", "artifact"}], "slices": [the same]}],
     "activations": [{"layer", "op", "low", "high", "quantiles": [0.1 %, 50 %, 99.9 %], "sqnr_db"}]}
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import asdict
from typing import Any

from edgert.bundle.bundle_file import Bundle
from edgert.errors import BundleError
from edgert_deploy.packager.accuracy.accuracy_gate import Group, Limits, Verdict
from edgert_deploy.packager.accuracy.activation_ranges import Activation
from edgert_deploy.packager.candidates import Candidate
from edgert_deploy.packager.choice import Choice
from edgert_deploy.packager.mixed_precision import Fallback

PATH = "receipt.json"
FORMAT = 1
BYTES_MAX = 16 * 1024**2


def receipt(
    limits: Limits,
    choices: Sequence[Choice],
    candidates: Sequence[Candidate],
    packed: Container[str],
    activations: Sequence[Activation] = (),
    licence: str = "",
    notes: str = "",
) -> bytes:
    """The file's bytes: JSON with sorted keys, readable lines, ASCII. `packed` names the artifacts of the bundle."""
    tried = {id(candidate) for choice in choices for candidate in choice.tried}
    # Of the sets of layers that a search tried, the one that won; `trials` tells of the others, also after a resumption.
    candidates = [c for c in candidates if id(c) in tried or not c.artifact.float_layers]
    accuracy = candidates[0].verdict.accuracy
    value = {
        "format": FORMAT,
        "licence": licence,
        "notes": notes,
        "gate": {
            "metric": accuracy.metric,
            "samples": accuracy.samples,
            "max_drop": limits.max_drop,
            "max_class_drop": limits.max_class_drop,
        },
        "targets": [_target(choice) for choice in choices],
        "candidates": [_candidate(candidate, candidate.id in packed) for candidate in candidates],
        "activations": [asdict(activation) for activation in activations],
    }
    return json.dumps(value, sort_keys=True, indent=1, allow_nan=False).encode() + b"\n"


def read_receipt(bundle: Bundle) -> dict[str, Any] | None:
    """The receipt of an open bundle, None where it holds none (it was built before there were any). Raises BundleError."""
    if all(file.path != PATH for file in bundle.manifest.files):
        return None
    try:
        value = json.loads(bundle.read_file(PATH, BYTES_MAX))
    except ValueError as error:
        raise BundleError(f"the bundle's {PATH} is not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise BundleError(f"the bundle's {PATH} has another format than {FORMAT}: update edgert")
    return value


def _target(choice: Choice) -> dict[str, Any]:
    return {
        "profile": choice.profile.name,
        "ladder": [candidate.id for candidate in choice.ladder],
        "left_out": [vars(one) for one in choice.left_out],
        "remarks": list(choice.remarks),
        "fallbacks": [{"engine": engine, **_fallback(fallback)} for engine, fallback in choice.fallbacks],
        "times": [{"id": name, **vars(choice.timings[name])} for name in sorted(choice.timings)],
    }


def _fallback(fallback: Fallback) -> dict[str, Any]:
    """The harm of each layer, in the order of the graph, and how many of the worst were tried in float."""
    return {
        "layers": [{"name": h.layer.name, "op": h.layer.op, "sqnr_db": h.sqnr_db} for h in fallback.harms],
        "trials": [vars(trial) for trial in fallback.trials],
        "spent": fallback.spent,
    }


def _candidate(candidate: Candidate, packed: bool) -> dict[str, Any]:
    artifact, verdict = candidate.artifact, candidate.verdict
    return {
        "id": candidate.id,
        "engine": artifact.engine,
        "precision": artifact.precision,
        "kind": artifact.kind,
        "float_layers": list(artifact.float_layers),
        "qat": artifact.qat,
        "size_bytes": candidate.size_bytes,
        "judged_by": artifact.judged_by,
        "tools": artifact.tools,
        "packed": packed,
        **verdict_as_json(verdict),
    }


def verdict_as_json(verdict: Verdict) -> dict[str, Any]:
    accuracy = verdict.accuracy
    return {
        "passed": verdict.passed,
        "accuracy": {
            "metric": accuracy.metric,
            "samples": accuracy.samples,
            "fp32": accuracy.fp32,
            "artifact": accuracy.artifact,
            "drop": accuracy.drop,
        },
        "also": {name: {"fp32": fp32, "artifact": artifact} for name, fp32, artifact in verdict.also},
        "classes": [_group(group) for group in verdict.groups if group.kind == "class"],
        "slices": [_group(group) for group in verdict.groups if group.kind == "slice"],
    }


def _group(group: Group) -> dict[str, Any]:
    return {"name": group.name, "samples": group.samples, "fp32": group.fp32, "artifact": group.artifact}

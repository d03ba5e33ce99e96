"""The receipt: all findings of a build, as one JSON file in the signed bundle.

Devices do not unpack the receipt. The manifest has the facts that a device needs, and the receipt has the reasons. It
lists every candidate with its accuracy by class and slice, its layers in float, and its times if the build measured
them. It also lists the engines that were left out. It holds no time of day, no path and no duration of the build. So
the same inputs give the same bytes, unless candidates were measured.

`int8_share` is the share of multiply-accumulates that run in INT8, read from the artifact; null if the share is
unknown. The drop is between `drop_low` and `drop_high` with 95 % confidence. Both are null for a metric that is not a
share of samples.

    {"format": 2, "licence": text, "notes": text,
     "gate": {"metric", "samples", "max_drop", "max_class_drop"},
     "targets": [{"profile", "artifacts": [id], "left_out": [{"engine", "code", "reason"}],
                  "not_built": [{"engine", "how", "reason"}], "warnings": [text],
                  "mixed_precision": [{"engine", "layers": [{"name", "op", "sqnr_db"}],
                                       "attempts": [{"count", "passed", "drop", "share"}], "budget_spent"}],
                  "times": [{"id", "where", "p50_ms", "p90_ms", "threads", "runs", "engine_version", "error"}]}],
     "candidates": [{"id", "engine", "precision", "kind", "recipe", "float_layers": [name], "int8_share", "qat",
                     "size_bytes", "judged_by", "tools", "packed", "passed",
                     "accuracy": {"metric", "samples", "fp32", "artifact", "drop", "drop_low", "drop_high"},
                     "other_metrics": {name: {"fp32", "artifact"}},
                     "classes": [{"name", "samples", "fp32", "artifact"}], "slices", "buckets", "outputs": [the same]}],
     "activations": [{"layer", "op", "low", "high", "quantiles": [0.1 %, 50 %, 99.9 %], "sqnr_db"}]}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from edgert.bundle.bundle_file import Bundle
from edgert.errors import BundleError
from edgert_deploy.packager.accuracy.activation_ranges import Activation
from edgert_deploy.packager.candidates.candidate import Candidate
from edgert_deploy.packager.candidates.choice import Choice, all_packed
from edgert_deploy.packager.candidates.mixed_precision import Search
from edgert_deploy.packager.request import BuildRequest

PATH = "receipt.json"
FORMAT = 2
BYTES_MAX = 16 * 1024**2


def receipt(
    request: BuildRequest, choices: Sequence[Choice], candidates: Sequence[Candidate], activations: Sequence[Activation]
) -> bytes:
    """Return the file's bytes: JSON with sorted keys, readable lines, ASCII."""
    # A search builds many candidates. The receipt lists the chosen candidate, and `attempts` describes the others.
    tried = {id(candidate) for choice in choices for candidate in choice.tried}
    candidates = [c for c in candidates if id(c) in tried or not c.artifact.float_layers]
    packed, first = all_packed(choices), candidates[0].result
    value = {
        "format": FORMAT,
        "licence": request.licence,
        "notes": request.notes,
        "gate": {"metric": first.accuracy.metric, "samples": first.accuracy.samples, **asdict(first.limits)},
        "targets": [_target(choice) for choice in choices],
        "candidates": [_candidate(candidate, candidate.id in packed) for candidate in candidates],
        "activations": [asdict(activation) for activation in activations],
    }
    return json.dumps(value, sort_keys=True, indent=1, allow_nan=False).encode() + b"\n"


def read_receipt(bundle: Bundle) -> dict[str, Any] | None:
    """Return the receipt of an open bundle, or None if the bundle has no receipt. Raises BundleError."""
    if all(file.path != PATH for file in bundle.manifest.files):
        return None
    try:
        value = json.loads(bundle.read_file(PATH, BYTES_MAX))
    except ValueError as error:
        raise BundleError(f"the bundle's {PATH} is not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise BundleError(
            f"the bundle's {PATH} does not have format {FORMAT}: build the bundle again, or update edgert"
        )
    return value


def _target(choice: Choice) -> dict[str, Any]:
    return {
        "profile": choice.profile.name,
        "artifacts": [candidate.id for candidate in choice.packed],
        "left_out": [vars(entry) for entry in choice.left_out],
        "not_built": [vars(entry) for entry in choice.not_built],
        "warnings": list(choice.warnings),
        "mixed_precision": [{"engine": engine, **_search(search)} for engine, search in choice.searches],
        "times": [{"id": name, **vars(choice.timings[name])} for name in sorted(choice.timings)],
    }


def _search(search: Search) -> dict[str, Any]:
    """Return the harm of each layer, in graph order, and each attempt with layers in float."""
    return {
        "layers": [{"name": h.layer.name, "op": h.layer.op, "sqnr_db": h.sqnr_db} for h in search.harms],
        "attempts": [vars(attempt) for attempt in search.attempts],
        "budget_spent": search.budget_spent,
    }


def _candidate(candidate: Candidate, packed: bool) -> dict[str, Any]:
    artifact, result = candidate.artifact, candidate.result
    accuracy = result.accuracy
    low, high = (None, None) if result.drop_interval is None else (round(end, 6) for end in result.drop_interval)

    def groups(kind: str) -> list[dict[str, Any]]:
        fields = ("name", "samples", "fp32", "artifact")
        return [{field: getattr(group, field) for field in fields} for group in result.groups if group.kind == kind]

    return {
        "id": candidate.id,
        "engine": artifact.engine,
        "precision": artifact.precision,
        "kind": artifact.kind,
        "recipe": candidate.recipe,
        "float_layers": list(artifact.float_layers),
        "int8_share": artifact.int8_share,
        "qat": artifact.qat,
        "size_bytes": candidate.size_bytes,
        "judged_by": artifact.judged_by,
        "tools": artifact.tools,
        "packed": packed,
        "passed": result.passed,
        "accuracy": {
            **{field: getattr(accuracy, field) for field in ("metric", "samples", "fp32", "artifact", "drop")},
            "drop_low": low,
            "drop_high": high,
        },
        "other_metrics": {
            other.name: {"fp32": other.fp32, "artifact": other.artifact} for other in result.other_metrics
        },
        "classes": groups("class"),
        "slices": groups("slice"),
        "buckets": groups("bucket"),
        "outputs": groups("output"),
    }

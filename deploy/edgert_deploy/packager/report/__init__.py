"""The data of the report on a bundle. Commands show it as text or JSON, and page.py shows it as HTML.

`gather` reads the signed manifest, the receipt and the artifacts once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.bundle_file import Bundle
from edgert.bundle.manifest import ArtifactEntry, Manifest
from edgert.errors import BundleError
from edgert_deploy.common.temporary_folder import temporary_folder
from edgert_deploy.packager.builders import BUILDERS, builder_for
from edgert_deploy.packager.receipt import PATH, read_receipt

Receipt = dict[str, Any]

# The parts of a receipt that the report shows, and the keys that each of their entries needs. The report checks these
# keys, because another tool may have written the receipt.
PARTS = {
    "targets": ("profile",),
    "candidates": ("id", "engine", "kind", "size_bytes", "packed", "passed", "accuracy"),
    "activations": ("layer", "op", "low", "high", "quantiles", "sqnr_db"),
}


@dataclass(frozen=True)
class GoldenAgreement:
    """The difference of two artifacts' answers to the golden samples, in the output that differs most.

    Attributes:
        difference: The largest difference of any element.
        tolerance: The largest difference between a device's answers and the answers of `artifact`.
        same_class: The share of samples with the same top class in both artifacts. None if the output holds no scores.
    """

    artifact: str
    other: str
    output: str
    difference: float
    tolerance: float
    same_class: float | None


@dataclass(frozen=True)
class Report:
    """All facts about a bundle. `receipt` is {} for a bundle without a receipt."""

    manifest: Manifest
    digest: str
    key_ids: tuple[str, ...]
    size_bytes: int
    golden_samples: int
    layers: dict[str, dict[str, dict[str, int]]]
    goldens: tuple[GoldenAgreement, ...]
    receipt: Receipt

    def as_json(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "key_ids": list(self.key_ids),
            "size_bytes": self.size_bytes,
            "golden_samples": self.golden_samples,
            "layers": self.layers,
            "goldens": [asdict(one) for one in self.goldens],
            "receipt": self.receipt,
        }

    def candidates(self) -> list[dict[str, Any]]:
        """Return all candidates, packed or not. Without a receipt, return the manifest's artifacts."""
        if entries := self.receipt.get("candidates"):
            return list(entries)
        return [
            {
                "id": a.id,
                "engine": a.engine,
                "kind": a.precision,
                "size_bytes": self.manifest.artifact_bytes(a),
                "packed": True,
                "passed": a.accuracy.passed,
                "accuracy": {**asdict(a.accuracy), "drop": a.accuracy.drop},
            }
            for a in self.manifest.artifacts
        ]

    def times(self) -> list[tuple[str, dict[str, Any]]]:
        """Return (target, times of a candidate) for each timed candidate. An error may replace the times."""
        targets = self.receipt.get("targets", [])
        return [(target["profile"], timing) for target in targets for timing in target.get("times", [])]

    def harms(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """Return (engine, layers) for each search for mixed precision, the most harmful layer first."""
        by_engine = {}
        for target in self.receipt.get("targets", []):
            for search in target.get("mixed_precision", []):
                by_engine[search["engine"]] = sorted(search["layers"], key=lambda layer: layer["sqnr_db"])
        return sorted(by_engine.items())

    def worst_activations(self, count: int) -> list[dict[str, Any]]:
        """Return the `count` layers whose own answers lose most in 8 bits."""
        return sorted(self.receipt.get("activations", []), key=lambda one: float(one["sqnr_db"]))[:count]


def gather(bundle: Bundle, size_bytes: int) -> Report:
    """Return the report on an open bundle. Raises BundleCorrupt if a file was changed, or BundleError."""
    manifest = bundle.manifest
    with temporary_folder("report") as folder:
        bundle.unpack(folder, frozenset(entry.path for entry in manifest.files))
        return Report(
            manifest=manifest,
            digest=bundle.digest,
            key_ids=tuple(bundle.envelope.key_ids),
            size_bytes=size_bytes,
            golden_samples=len(_load(folder / manifest.golden_inputs[0])),
            layers={a.id: _layer_precisions(a.engine, folder / a.entry) for a in manifest.artifacts},
            goldens=tuple(_agreement(manifest, a, b, folder) for a, b in combinations(manifest.artifacts, 2)),
            receipt=_checked(read_receipt(bundle) or {}),
        )


def _checked(receipt: Receipt) -> Receipt:
    """Return `receipt`. Raises BundleError if a part does not have the form that PARTS requires."""
    for part, keys in PARTS.items():
        entries = receipt.get(part, [])
        if not isinstance(entries, list):
            raise BundleError(f"the bundle's {PATH} has a {part!r} that is not a list: build the bundle again")
        for i, entry in enumerate(entries):
            if not isinstance(entry, dict) or (missing := [key for key in keys if key not in entry]):
                what = f"lacks {', '.join(missing)}" if isinstance(entry, dict) else "is not an object"
                raise BundleError(f"{part}[{i}] of the bundle's {PATH} {what}: build the bundle again")
    return receipt


def _agreement(manifest: Manifest, one: ArtifactEntry, other: ArtifactEntry, folder: Path) -> GoldenAgreement:
    cells = []
    for i, spec in enumerate(manifest.outputs):
        a, b = _load(folder / one.golden_outputs[i]), _load(folder / other.golden_outputs[i])
        if a.shape != b.shape:
            raise BundleError(
                f"the golden answers of {one.id} and {other.id} have different shapes, {a.shape} and {b.shape}: "
                "build the bundle again"
            )
        difference = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max()) if a.size else 0.0
        scores = a.ndim == 2 and a.shape[1] > 1 and a.dtype.kind == "f"
        same = float((a.argmax(axis=1) == b.argmax(axis=1)).mean()) if scores else None
        cells.append(GoldenAgreement(one.id, other.id, spec.name, difference, one.golden_atol[i], same))
    return max(cells, key=lambda agreement: agreement.difference / max(agreement.tolerance, 1e-12))


def _layer_precisions(engine: str, path: Path) -> dict[str, dict[str, int]]:
    """Return {kind of layer: {dtype: count}}, the most frequent first; {} if no reader can read the file."""
    counts: dict[str, Counter[str]] = {}
    try:
        for kind, precision, _ in builder_for(engine).layers(path) if engine in BUILDERS else ():
            counts.setdefault(kind, Counter())[precision] += 1
    except Exception:  # noqa: BLE001 - the engines' parsers may raise any error for a file of any origin
        return {}
    ordered = sorted(counts, key=lambda kind: (-sum(counts[kind].values()), kind))
    return {kind: dict(counts[kind].most_common()) for kind in ordered}


def _load(path: Path) -> NDArray[Any]:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise BundleError(f"{path.name} of the golden samples is not an array: {error}") from error
    assert isinstance(array, np.ndarray)
    return np.atleast_1d(array)

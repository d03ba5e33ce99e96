"""The report on a bundle: what a colleague would ask of it, gathered once, then written as text, JSON or one HTML page.

`gather` reads the signed manifest, the receipt and the artifacts; text.py and page.py only show what it found.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.bundle_file import Bundle
from edgert.bundle.manifest import ArtifactEntry, Manifest
from edgert.errors import BundleError
from edgert_deploy.packager.receipt import read_receipt
from edgert_deploy.packager.report.artifact_layers import layer_precisions

Receipt = dict[str, Any]


@dataclass(frozen=True)
class GoldenAgreement:
    """How far two artifacts' answers to the golden samples lie apart, for the output that differs most.

    `difference` is the largest of any element, `tolerance` what a device may differ by from the first's answers;
    `same_class` is the share of samples for which both name the same class, None where the output holds no scores.
    """

    artifact: str
    other: str
    output: str
    difference: float
    tolerance: float
    same_class: float | None


@dataclass(frozen=True)
class Report:
    """All that is known of a bundle. `receipt` is {} for one that was built before there were any."""

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

    def artifact_bytes(self, artifact: ArtifactEntry) -> int:
        return sum(self.manifest.file(path).size_bytes for path in artifact.files)

    def candidates(self) -> list[dict[str, Any]]:
        """What was built, packed or not; without a receipt what the manifest says of the artifacts."""
        if self.receipt:
            return list(self.receipt["candidates"])
        return [
            {
                "id": a.id,
                "engine": a.engine,
                "kind": a.precision,
                "size_bytes": self.artifact_bytes(a),
                "packed": True,
                "passed": a.accuracy.passed,
                "accuracy": {**asdict(a.accuracy), "drop": a.accuracy.drop},
            }
            for a in self.manifest.artifacts
        ]

    def times(self) -> list[tuple[str, dict[str, Any]]]:
        """(target, how fast a candidate was, or the error that kept it from being measured)."""
        targets = self.receipt.get("targets", [])
        return [(target["profile"], one) for target in targets for one in target.get("times", [])]

    def harms(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """The search for the layers that INT8 harms, where one was made: its engine, and the layers, the worst first."""
        found = {}
        for target in self.receipt.get("targets", []):
            for search in target.get("mixed_precision", []):
                found[search["engine"]] = sorted(search["layers"], key=lambda layer: layer["sqnr_db"])
        return sorted(found.items())


def gather(bundle: Bundle, size_bytes: int) -> Report:
    """Raises BundleCorrupt where a file is not what was signed, BundleError where one cannot be read as what it is."""
    manifest = bundle.manifest
    with tempfile.TemporaryDirectory(prefix="edgert-report-") as folder:
        bundle.unpack(Path(folder), frozenset(entry.path for entry in manifest.files))
        return Report(
            manifest=manifest,
            digest=bundle.digest,
            key_ids=tuple(bundle.envelope.key_ids),
            size_bytes=size_bytes,
            golden_samples=len(_load(Path(folder) / manifest.golden_inputs[0])),
            layers={a.id: layer_precisions(a.engine, Path(folder) / a.entry) for a in manifest.artifacts},
            goldens=tuple(_agreement(manifest, a, b, Path(folder)) for a, b in combinations(manifest.artifacts, 2)),
            receipt=read_receipt(bundle) or {},
        )


def _agreement(manifest: Manifest, one: ArtifactEntry, other: ArtifactEntry, folder: Path) -> GoldenAgreement:
    found = []
    for i, spec in enumerate(manifest.outputs):
        a, b = _load(folder / one.golden_outputs[i]), _load(folder / other.golden_outputs[i])
        if a.shape != b.shape:
            raise BundleError(f"golden answers of {one.id} and {other.id} have shapes {a.shape} and {b.shape}")
        difference = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max()) if a.size else 0.0
        scores = a.ndim == 2 and a.shape[1] > 1 and a.dtype.kind == "f"
        same = float((a.argmax(axis=1) == b.argmax(axis=1)).mean()) if scores else None
        found.append(GoldenAgreement(one.id, other.id, spec.name, difference, one.golden_atol[i], same))
    return max(found, key=lambda agreement: agreement.difference / max(agreement.tolerance, 1e-12))


def _load(path: Path) -> NDArray[Any]:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise BundleError(f"{path.name} of the golden samples is no array: {error}") from error
    assert isinstance(array, np.ndarray)
    return np.atleast_1d(array)

"""Bundles of the digits, packed for profiles of the tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from edgert.bundle.signing import SigningKey
from edgert_deploy.packager.candidates.candidate import Candidate
from edgert_deploy.packager.pack import BuildResult, build_bundle
from edgert_deploy.packager.request import BuildRequest
from edgert_deploy.packager.samples.samples import CalibrationSet


def pack(request: BuildRequest, key: SigningKey, out: Path) -> BuildResult:
    return build_bundle(request, key, out, lambda line: None, lambda choice: None)


def candidates_of(result: BuildResult) -> list[Candidate]:
    """Return the candidates that were packed, target by target, the best first."""
    return [candidate for choice in result.choices for candidate in choice.packed]


def lossy(request: BuildRequest) -> BuildRequest:
    """Return the request with black images for the calibration, so that INT8 clips most activations."""
    dark = {"image": np.zeros_like(request.calibration.inputs["image"])}
    return replace(request, calibration=CalibrationSet(dark, None))

"""Bundles of the digits, packed for profiles of the tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from edgert.bundle.signing import SigningKey
from edgert_deploy.packager.pack import BuildResult, build_bundle
from edgert_deploy.packager.request import BuildRequest
from edgert_deploy.packager.samples.samples import CalibrationSet


def pack(request: BuildRequest, key: SigningKey, out: Path) -> BuildResult:
    return build_bundle(request, key, out, lambda line: None, lambda choice: None)


def lossy(request: BuildRequest) -> BuildRequest:
    """Calibrated on one pixel's worth of light: every activation is clipped, and most answers are lost."""
    dark = {"image": np.zeros_like(request.calibration.inputs["image"])}
    return replace(request, calibration=CalibrationSet(dark, None))

"""The table of a build does not call a larger size smaller."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert_deploy.cli.build.output import size_change


def test_a_larger_artifact_is_not_called_smaller() -> None:
    assert size_change(50, 100) == "2.0x less"
    assert size_change(200, 100) == "2.0x more"

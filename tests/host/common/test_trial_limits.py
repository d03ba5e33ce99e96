"""Trial limits come from the command line, a model's table and the project, in this order of precedence."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert.errors import ConfigInvalid
from edgert.versions.trial_limits import (
    TrialLimits,
)
from edgert_deploy.common.project import read_project
from edgert_deploy.common.trial_limits import limits_for


def test_limits_of_the_command_line_precede_limits_of_the_model_and_general_limits(tmp_path: Path) -> None:
    (tmp_path / "edgert.toml").write_text(
        '[trial]\nwatch = "10m"\ntemp_c = 80\nerror_share = "0.1%"\n[trial.m]\np99_ms = 8\ntemp_c = "off"\n'
    )
    table = read_project(tmp_path / "edgert.toml").trial
    assert limits_for("m", {}, {}) is None
    assert limits_for("m", table, {"p99_ms": 5.0}) == TrialLimits({"error_share": 0.1 / 100, "p99_ms": 5.0}, 600.0)
    assert limits_for("other", table, {"error_share": None}, 90.0, True) == TrialLimits({"temp_c": 80.0}, 90.0, True)
    for wrong, says in {
        "p99 = 8": r"\[trial\]: p99 = 8 is invalid; known: p99_ms",
        "m.p99_ms = 'x'": r"\[trial.m\]: ",
    }.items():
        (tmp_path / "edgert.toml").write_text(f"[trial]\n{wrong}\n")
        with pytest.raises(ConfigInvalid, match=says):
            read_project(tmp_path / "edgert.toml")

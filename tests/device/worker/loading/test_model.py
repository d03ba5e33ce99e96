"""Loading one version of one model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgert.errors import EdgeRTError
from edgert.worker.loading.learned import Circumstances, Learned, LearnedFile
from edgert.worker.loading.model import load_model, may_have_reactor
from tests.support.stand_ins.loaded_models import installed, loaded

ITEM = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)


def test_a_model_is_loaded_with_what_was_learned(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    assert (model.learned.batch_cap, model.degraded, model.tried) == (4, False, ())
    assert model.session.run([ITEM])[0].tolist() == ITEM.tolist()


def test_a_loaded_model_lists_a_preferred_artifact_that_does_not_load(tmp_path: Path) -> None:
    model = loaded(tmp_path, first=("null", b"?"))
    assert model.degraded
    assert len(model.tried) == 1
    assert model.tried[0].startswith("first: ")


def test_with_strict_a_model_without_its_preferred_artifact_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(EdgeRTError):
        loaded(tmp_path, "[serving]\nstrict = true\n", first=("null", b"?"))


def test_a_model_with_wrong_golden_answers_is_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(EdgeRTError):
        loaded(tmp_path, golden_off_by=1.0)


def test_the_reactor_has_a_session_for_each_run_at_once_if_that_was_learned(tmp_path: Path) -> None:
    version, state, config = installed(tmp_path)
    (artifact,) = version.manifest.artifacts
    measured = load_model(version, state, config)
    assert measured.reactor_sessions == ()
    file = LearnedFile(state.learned, version.manifest.file(artifact.entry).sha256)
    circumstances = Circumstances.of(artifact.engine, measured.engine_version, config.serving, reactor=True)
    file.write(circumstances, Learned(threads=2, instances=3, reactor_session=True))
    model = load_model(version, state, config)
    assert len(model.reactor_sessions) == len(model.more_sessions) + 1 == 3
    assert model.session not in model.reactor_sessions
    assert model.reactor_sessions[0].run([ITEM])[0].tolist() == ITEM.tolist()


@pytest.mark.parametrize(("config", "may"), [("", True), ("[models.echo]\np95_ms = 5.0\n", False)])
def test_a_model_with_a_latency_target_has_no_reactor(tmp_path: Path, config: str, may: bool) -> None:
    version, _, settings = installed(tmp_path, config)
    assert may_have_reactor(version.manifest, settings) is may


def test_the_configured_number_of_sessions_is_open(tmp_path: Path) -> None:
    version, state, config = installed(tmp_path, "[serving]\ninstances = 3\nthreads = 1\nbatch_max = 1\n")
    first = load_model(version, state, config)
    again = load_model(version, state, config)  # an earlier load has learned the settings
    assert len(first.more_sessions) == len(again.more_sessions) == 2
    assert {(each.learned.threads, each.learned.batch_cap) for each in (first, again)} == {(1, 1)}

"""Golden samples: the answers that are equal within the tolerance, and the samples that prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgert.checks.golden_samples import Arrays, check, samples
from edgert.errors import BundleCorrupt, HealthCheckFailed
from edgert.versions.installed import InstalledVersion
from tests.support.stand_ins.loaded_models import installed


@pytest.fixture
def version(tmp_path: Path) -> InstalledVersion:
    return installed(tmp_path)[0]


def test_samples_come_one_by_one_and_right_answers_have_no_difference(version: InstalledVersion) -> None:
    assert [sample[0].shape for sample in samples(version)] == [(1, 4), (1, 4)]
    assert check(version, version.artifacts[0], lambda sample: sample) == [0.0]
    assert check(version, version.artifacts[0], lambda sample: sample, as_sent=True) == [0.0]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda sample: [sample[0] + 1], "differs from its golden values by 1, more than 1e-06"),
        (lambda sample: [sample[0] * np.float32(np.nan)], "differs from its golden values by nan"),
        (lambda sample: [sample[0][:, :2]], r"has shape \[1, 2\], expected \[1, 4\]"),
    ],
    ids=["other", "nan", "shape"],
)
def test_wrong_answers_fail_the_check(version: InstalledVersion, answer: Callable[[Arrays], Arrays], says: str) -> None:
    with pytest.raises(HealthCheckFailed, match=says):
        check(version, version.artifacts[0], answer)


@pytest.mark.parametrize("shape", [(0, 4), ()], ids=["none", "no-batch"])
def test_a_bundle_without_golden_samples_does_not_pass_the_check(
    version: InstalledVersion, shape: tuple[int, ...]
) -> None:
    for name in ("input-0", "null/output-0"):
        np.save(version.folder / f"golden/{name}.npy", np.zeros(shape, np.float32))
    with pytest.raises(BundleCorrupt, match=r"no golden samples.*build it again"):
        check(version, version.artifacts[0], lambda sample: sample)


def test_answers_for_other_samples_and_files_that_cannot_be_read_are_reported(version: InstalledVersion) -> None:
    np.save(version.folder / "golden/null/output-0.npy", np.zeros((3, 4), np.float32))
    with pytest.raises(HealthCheckFailed, match="3 golden answers for 2 golden samples"):
        check(version, version.artifacts[0], lambda sample: sample)
    (version.folder / "golden/input-0.npy").write_bytes(b"")
    with pytest.raises(BundleCorrupt, match="cannot be read"):
        list(samples(version))


def test_golden_values_that_changed_on_disk_do_not_blame_the_device(version: InstalledVersion) -> None:
    path = version.folder / "golden/null/output-0.npy"
    np.save(path, np.load(path) + np.float32(1))
    with pytest.raises(BundleCorrupt, match=r"output-0.npy changed on disk since its install: deploy it again"):
        check(version, version.artifacts[0], lambda sample: sample)

"""Parameters have units, and the error of a wrong value shows a right value."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest

from edgert.cli.quantity import Duration
from edgert.errors import ConfigInvalid
from edgert_deploy.cli.shared.types import (
    FILE,
    ChannelName,
    DeviceCount,
    DeviceShare,
    ModelOrBundle,
    NewBundlePath,
    Rate,
    Size,
)


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        (Duration(10, 60), "10s", 10.0),
        (Duration(10, 60), "1m", 60.0),
        (Duration(10, 60), 60.0, 60.0),
        (Size(1000), "2MB", 2_000_000),
        (Rate(1000), "2MB/s", 2_000_000),
        (DeviceShare(), " 5% ", 0.05),
        (DeviceShare(), "100%", 1.0),
        (DeviceCount(1), "3", 3),
        (ChannelName(), "stable", "stable"),
    ],
)
def test_common_forms_of_values_are_accepted(kind: Any, given: Any, value: Any) -> None:
    assert (
        kind.convert(given, None, None) == pytest.approx(value) if value != given else kind.convert(given, None, None)
    )


@pytest.mark.parametrize(
    ("kind", "given", "reason"),
    [
        (Duration(10, 60), "9s", "give at least 10s and at most 1m"),
        (Duration(10), "9s", "give at least 10s$"),
        (Duration(10, 60), "61s", "at most 1m"),
        (Duration(), "soon", "soon"),
        (DeviceShare(), "0%", "give 5%, 50% or 100%"),
        (DeviceShare(), "101%", "not a share"),
        (DeviceShare(), "5", "not a share"),
        (DeviceCount(1), "kitchen", "edgert deploy BUNDLE SELECTOR"),
        (DeviceCount(1), "0", "x>=1"),
        (ChannelName(), "a/b", "not a name of a channel"),
    ],
)
def test_a_value_out_of_range_is_refused_with_a_valid_value(kind: Any, given: str, reason: str) -> None:
    with pytest.raises(click.BadParameter, match=reason):
        kind.convert(given, None, None)


def test_a_named_pipe_is_refused_and_a_missing_file_is_left_to_the_command(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigInvalid, match="use a regular file"):
        FILE.convert(str(tmp_path / "pipe"), None, None)
    assert FILE.convert(str(tmp_path / "none"), None, None) == tmp_path / "none"


def test_a_name_without_a_file_is_a_model_and_a_missing_bundle_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    kind = ModelOrBundle()
    assert kind.convert("digits", None, None) == "digits"
    (tmp_path / "copy").write_bytes(b"")
    assert kind.convert("copy", None, None) == Path("copy")
    with pytest.raises(ConfigInvalid, match=r"none\.edgert"):
        kind.convert("none.edgert", None, None)


def test_a_new_bundle_goes_to_the_folder_of_the_project_only_if_its_path_is_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert NewBundlePath().convert("a.edgert", None, None) == Path("a.edgert")
    (tmp_path / "edgert.toml").write_text('bundles = "built"\n')
    assert NewBundlePath().convert("a.edgert", None, None) == tmp_path / "built" / "a.edgert"
    assert (tmp_path / "built").is_dir()
    assert NewBundlePath().convert(f"{tmp_path}/a.edgert", None, None) == tmp_path / "a.edgert"

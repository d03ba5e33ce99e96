"""Files that a user names: pipes and devices are refused before they are opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgert.errors import ConfigInvalid
from edgert.toml_file import read_text, read_toml


def test_a_named_pipe_and_a_device_are_refused_before_they_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path / "pipe.toml", Path("/dev/zero")):
        with pytest.raises(ConfigInvalid, match="is a named pipe or a device"):
            read_toml(path)


def test_the_pipe_of_another_command_is_read() -> None:
    """A shell passes such a path for `<(command)`."""
    reader, writer = os.pipe()
    with os.fdopen(reader):
        os.write(writer, b"text")
        os.close(writer)
        assert read_text(Path(f"/dev/fd/{reader}"), 10) == "text"

"""`edgertd start`: the path of the daemon's log. tests/end_to_end starts daemons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgert.cli.start import start_daemon
from edgert.errors import StorageFailed
from edgert.state_dir import StateDir


class ReadOnlyState(StateDir):
    """A state folder on read-only storage; `volatile` is the folder in memory."""

    read_only = True

    def volatile(self, name: str) -> Path:
        return self.root / "memory" / name


def test_on_read_only_storage_the_error_names_the_log_in_memory(tmp_path: Path) -> None:
    state = ReadOnlyState(tmp_path)
    state.volatile(state.log.name).mkdir(parents=True)
    with pytest.raises(StorageFailed, match=rf"^cannot write {re.escape(str(tmp_path))}/memory/edgertd\.log: "):
        start_daemon(state)

"""A failure of the log never stops the daemon."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("stderr", ["/dev/full", None], ids=["full disk", "closed"])
def test_a_log_line_that_cannot_be_written_is_dropped_and_the_process_continues(stderr: str | None) -> None:
    closing = "import os; os.close(2)" if stderr is None else "pass"
    code = f"{closing}\nfrom edgert.log import log\nlog('lost')\nprint('alive')"
    with open(stderr or "/dev/null", "w") as target:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=target, text=True)
    assert done.stdout == "alive\n"

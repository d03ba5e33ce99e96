"""Silences vendors' tools, which print banners and write files to the working folder.

Standard output belongs to the command's result (`--json` must stay JSON). While a vendor's tool runs, file descriptors
1 and 2 point to a temporary file. This also silences native code.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path


@contextmanager
def quiet() -> Iterator[None]:
    """Discard everything that this process writes to stdout and stderr, and Python's warnings."""
    with ExitStack() as stack:
        sink = stack.enter_context(tempfile.TemporaryFile("w+"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            stack.callback(_restore, os.dup(descriptor), descriptor)
            os.dup2(sink.fileno(), descriptor)
        # sys.stdout and sys.stderr may write to other files than descriptors 1 and 2, such as in a test.
        stack.enter_context(redirect_stdout(sink))
        stack.enter_context(redirect_stderr(sink))
        yield


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Make `folder` the process's working folder, because some tools write files into the working folder."""
    before = os.open(".", os.O_PATH)  # the descriptor stays valid if the folder is renamed or removed
    try:
        os.chdir(folder)
        yield
    finally:
        os.fchdir(before)
        os.close(before)


def _restore(saved: int, descriptor: int) -> None:
    os.dup2(saved, descriptor)
    os.close(saved)

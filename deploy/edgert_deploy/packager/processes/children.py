"""The children of a build: the processes of vendors' engines and tools, whose native code may crash.

One child stays for the next request, because a new child needs 1 to 2 s to import its tools. Requests are pickled, but
answers are JSON and arrays (sandbox.py).
"""

from __future__ import annotations

import atexit
import mmap
import os
import pickle
import pkgutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.processes import sandbox
from edgert_deploy.packager.processes.sandbox import Answer, ChildFailed, Progress

LIMITS = sandbox.Limits(memory_bytes=0, time_s=8 * 3600)
ALIGNMENT_BYTES = 64
STORED_MAX = 4  # the number of stored values that are kept: enough for the hold-out and its parts

_idle: list[sandbox.Child] = []
_all: set[sandbox.Child] = set()
_lock = threading.Lock()


def call(function: str, request: dict[str, Any], payload: bytes = b"", progress: Progress = lambda _: None) -> Answer:
    """Return the answer of `function` ("module:name") in a child. Raises ChildFailed or its EdgeRTError."""
    with _idle_or_new_child() as child:
        return child.call(function, request, payload, LIMITS, progress)


def arrays_of(function: str, value: Any, *given: Any) -> list[NDArray[Any]]:
    """Return the arrays that `function(value, *given)` returns in a child. Raises the errors of `call`.

    Args:
        function: The function's name, as "module:name".
        value: A value whose arrays may be larger than the memory. The child reads these arrays from a file. Later calls
            with the same object use this file again.
        given: Further arguments, which are pickled.
    """
    stored = _stored_for(value)
    with tempfile.TemporaryDirectory(prefix="edgert-run-") as folder:
        request = {"call": function, "folder": folder, "stored": str(stored.path), "places": stored.places}
        answer, _ = call(f"{__name__}:arrays_in_child", request, pickle.dumps((stored.pickled, given)))
        return [np.load(Path(folder) / f"{i}.npy", allow_pickle=False) for i in range(int(answer["arrays"]))]


def arrays_in_child(request: dict[str, Any], payload: bytes, progress: Progress) -> Answer:
    """Call the function and write its arrays: the child's side of `arrays_of`."""
    folder = Path(request["folder"])
    put_temporary_files_into(folder)
    pickled, given = pickle.loads(payload)
    kept = pickle.loads(pickled, buffers=_mapped(Path(request["stored"]), request["places"]))
    arrays = pkgutil.resolve_name(request["call"])(kept, *given)
    for i, array in enumerate(arrays):
        np.save(folder / f"{i}.npy", array, allow_pickle=False)
    return {"arrays": len(arrays)}, b""


@dataclass(frozen=True)
class _StoredValue:
    """A value, and the file with its arrays."""

    value: Any
    pickled: bytes
    path: Path
    places: list[tuple[int, int]]  # the start and the end of each array in the file


_stored_values: list[_StoredValue] = []  # the most recently used one first


def _stored_for(value: Any) -> _StoredValue:
    """Return `value` with its file. Write a missing file, and keep only the STORED_MAX last used files."""
    known = (each for each in _stored_values if each.value is value and each.path.exists())
    stored = next(known, None) or _write_stored(value)
    _stored_values[:] = [stored, *(each for each in _stored_values if each is not stored)]
    while len(_stored_values) > STORED_MAX:
        _stored_values.pop().path.unlink(missing_ok=True)
    return stored


def _write_stored(value: Any) -> _StoredValue:
    buffers: list[pickle.PickleBuffer] = []
    pickled, places = pickle.dumps(value, protocol=5, buffer_callback=buffers.append), []
    # The file is in the temporary folder of the build, and the build removes this folder.
    with tempfile.NamedTemporaryFile(prefix="edgert-stored-", delete=False) as file:
        for buffer in buffers:
            file.seek(-file.tell() % ALIGNMENT_BYTES, os.SEEK_CUR)
            begin = file.tell()
            file.write(buffer.raw())
            places.append((begin, file.tell()))
    return _StoredValue(value, pickled, Path(file.name), places)


def _mapped(path: Path, places: Sequence[tuple[int, int]]) -> list[memoryview]:
    with path.open("rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if path.stat().st_size else b"")
    return [whole[begin:end] for begin, end in places]


def put_temporary_files_into(folder: Path) -> None:
    """Let this child write its temporary files into `folder`. The parent removes the folder."""
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)


def cause_text(failed: ChildFailed) -> str:
    """Return the cause of a child's failure as the predicate of a sentence."""
    return {
        "crash": f"crashed ({failed.detail})",
        "memory": "ran out of memory",
        "time": f"took more than {LIMITS.time_s // 3600} h of processor time",
        "wait": "stopped responding",
        "error": f"failed ({failed.detail})",
    }[failed.cause]


def kill_busy_children() -> None:
    """Kill each child with a request in progress."""
    with _lock:
        for child in _all.difference(_idle):
            child.kill()


@contextmanager
def _idle_or_new_child() -> Iterator[sandbox.Child]:
    """Yield an idle child, or a new child.

    Afterwards, the child stays if it answered its request, and if no other child is idle.
    """
    with _lock:
        child = _idle.pop() if _idle else sandbox.Child()
        _all.add(child)
    try:
        yield child
    finally:
        with _lock:
            keep = child.idle and not _idle
            (_idle.append if keep else _all.discard)(child)
        if not keep:
            child.close()


@atexit.register
def _close() -> None:
    for child in _idle:
        child.close()
    for stored in _stored_values:
        stored.path.unlink(missing_ok=True)

"""Reads weights into an ONNX model from the separate files that `torch.onnx.export` writes.

The model is untrusted. So each location of weights must be a plain file below the model's own folder, no link may lead
out of this folder, and the stated range must lie within the file. The model becomes one protobuf message together with
all its weights. Such a message has at most 2 GB.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from edgert.durable import os_error_as
from edgert.errors import SourceInvalid
from edgert_deploy.packager.sources.formats.git_lfs import pointer_problem
from edgert_deploy.packager.sources.onnx_graph.nodes import PROTO_BYTES_MAX, tensors


def files_of(name: str, proto_tensors: Iterator[Any]) -> list[str]:
    """Return the names of the files with the tensors' data, sorted.

    Raises SourceInvalid for a file outside of the model's folder.
    """
    locations = set()
    for tensor in filter(_is_external, proto_tensors):
        location = _entries(tensor).get("location", "")
        if not location or os.path.isabs(location) or ".." in Path(location).parts or "\0" in location:
            raise SourceInvalid(
                f"{name} keeps tensor {tensor.name[:80]!r} in {location[:200]!r}, which is not a file below the model's "
                "folder; export the model again"
            )
        locations.add(location)
    return sorted(locations)


def embed(path: Path, proto: Any) -> bool:
    """Read the external data of the model at `path` into `proto`; return whether the model has such data.

    All locations and sizes are checked before any data is read, so a model that is too large costs no memory. Raises
    SourceInvalid.
    """
    name = path.name
    places = list[tuple[Any, BinaryIO, int, int]]()
    with ExitStack() as stack:
        files = {each: stack.enter_context(open_file(path, each)) for each in files_of(name, tensors(proto))}
        for tensor in filter(_is_external, tensors(proto)):
            entries = _entries(tensor)
            file = files[entries["location"]]
            places.append((tensor, file, *_range(name, tensor, entries, os.fstat(file.fileno()).st_size)))
        total = sum(length for *_, length in places)
        if total > PROTO_BYTES_MAX:
            raise SourceInvalid(
                f"{name} has {total} bytes of weights; the limit is {PROTO_BYTES_MAX} for every engine, because the build "
                "makes every artifact from one protobuf message: use a smaller variant"
            )
        for tensor, file, offset, length in places:
            tensor.raw_data = _read(name, file, offset, length)  # so that no variable keeps a second copy
            del tensor.external_data[:]
            tensor.data_location = tensor.DEFAULT
    return bool(places)


def size_of(path: Path, locations: Sequence[str]) -> int:
    """Return the size of the model's external files. Raises SourceInvalid for an unreadable file."""
    total = 0
    for location in locations:
        with open_file(path, location) as file:
            total += os.fstat(file.fileno()).st_size
    return total


def open_file(model: Path, location: str) -> BinaryIO:
    """Open the file `location` below the folder of `model` for reading. Raises SourceInvalid."""
    folder, path = model.parent, model.parent / location
    keeps = f"{model.name} keeps weights in {location!r}"
    with os_error_as(SourceInvalid, f"{keeps}, which cannot be read", "put that file beside the model"):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise SourceInvalid(f"{keeps}, a link that leads out of the model's folder")
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SourceInvalid(f"{keeps}, which is not a regular file: replace it by the file itself")
    if problem := pointer_problem(path):
        os.close(descriptor)
        raise SourceInvalid(problem)
    return os.fdopen(descriptor, "rb")


def _read(name: str, file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    data = file.read(length)
    if len(data) < length:
        raise SourceInvalid(f"a file with weights of {name} became shorter while it was read: try again")
    return data


def _is_external(tensor: Any) -> bool:
    return bool(tensor.data_location == tensor.EXTERNAL or tensor.external_data)


def _entries(tensor: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _range(name: str, tensor: Any, entries: dict[str, str], size: int) -> tuple[int, int]:
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", size - offset))
    except ValueError:
        offset, length = -1, -1
    if not 0 <= offset <= size or not 0 <= length <= size - offset:
        raise SourceInvalid(
            f"tensor {tensor.name[:80]!r} of {name} lies beyond the end of {entries['location']!r} ({size} bytes): "
            "the file is cut short, or belongs to another export"
        )
    return offset, length

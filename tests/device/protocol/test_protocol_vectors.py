"""The Python codec agrees with docs/protocol-vectors.json, the tests of other languages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgert.errors import ProtocolError
from edgert.protocol import wire
from edgert.tensors import NUMPY_NAMES
from tests.support.frames import complete, out
from tests.support.protocol_vectors import DOCS, KINDS, VECTORS


def named(vectors: list[dict[str, Any]]) -> Any:
    return [pytest.param(vector, id=vector["name"]) for vector in vectors]


def encoded(vector: dict[str, Any], flags: int | None = None) -> list[wire.Buffer]:
    """The parts of the frame that a vector describes, written by the codec."""
    tensors = []
    for tensor in vector["tensors"]:
        array = np.array(tensor["values"], NUMPY_NAMES[tensor["datatype"]]).reshape(tensor["shape"])
        tensors.append(out(tensor["number"], array))
    return wire.frame(
        KINDS[vector["kind"]],
        flags=vector["flags"] if flags is None else flags,
        **{key: vector[key] for key in ("request_id", "model_id", "arg", "status", "stages")},
        meta=(vector["meta"] or "").encode(),
        tensors=tensors,
    )


def decoded(data: bytes, shared: bytes | None = None) -> dict[str, Any]:
    """Read a whole frame into the fields of a vector. `shared` is memory from offset 64 of a half."""
    frame = complete(data, shared=None if shared is None else memoryview(bytes(64) + shared))
    assert frame is not None
    return {
        "kind": next(name for name, kind in KINDS.items() if kind == frame.kind),
        "flags": frame.flags,
        "request_id": frame.request_id,
        "model_id": frame.model_id,
        "arg": frame.arg,
        "status": frame.status,
        "stages": list(wire.stage_times(frame)),
        "meta": frame.meta.decode() or None,
        "tensors": [
            {
                "number": tensor.number,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "values": np.frombuffer(tensor.data, NUMPY_NAMES[tensor.datatype]).tolist(),
            }
            for tensor in frame.tensors
        ],
    }


@pytest.mark.parametrize("vector", named(VECTORS["frames"]))
def test_a_frame_is_written_as_its_vector_says(vector: dict[str, Any]) -> None:
    assert b"".join(encoded(vector)).hex() == vector["hex"]


@pytest.mark.parametrize("vector", named(VECTORS["frames"]))
def test_a_frame_is_read_as_its_vector_says(vector: dict[str, Any]) -> None:
    read = decoded(bytes.fromhex(vector["hex"]))
    assert read == {key: vector[key] for key in read}


@pytest.mark.parametrize("vector", named(VECTORS["shared"]))
def test_a_frame_in_shared_memory_is_written_and_read_as_its_vector_says(vector: dict[str, Any]) -> None:
    area = memoryview(bytearray(4096))
    header = wire.share(encoded(vector, flags=0), area)
    assert header is not None
    memory = bytes.fromhex(vector["memory"])
    assert (header.hex(), bytes(area[64 : 64 + len(memory)])) == (vector["hex"], memory)
    read = decoded(header, memory)
    assert read == {key: vector[key] for key in read}


@pytest.mark.parametrize("vector", named(VECTORS["refused"]))
def test_a_frame_that_breaks_a_rule_is_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        decoded(bytes.fromhex(vector["hex"]))


def test_every_kind_and_every_datatype_has_a_vector() -> None:
    assert {vector["kind"] for vector in VECTORS["frames"]} == set(KINDS)
    assert {t["datatype"] for vector in VECTORS["frames"] for t in vector["tensors"]} == set(NUMPY_NAMES)


@pytest.mark.parametrize("name", ["hello", "infer"])
def test_the_examples_on_the_protocol_page_are_vectors(name: str) -> None:
    """docs/protocol.md shows two vectors in hex, in lines of 32 bytes."""
    vector = next(v for v in VECTORS["frames"] if v["name"] == name)
    lines = [vector["hex"][at : at + 64] for at in range(0, len(vector["hex"]), 64)]
    assert "\n".join(lines) in (DOCS / "protocol.md").read_text()

"""The bodies of inference requests and answers, without a socket."""

from __future__ import annotations

import json
from contextlib import nullcontext

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.errors import RequestError
from edgert.http import oip


def test_an_answer_with_too_many_values_must_be_binary() -> None:
    request = oip.read_request(
        memoryview(json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}).encode()),
        None,
    )
    many = {"y": np.zeros(oip.JSON_VALUES_MAX + 1, np.int8)}
    with pytest.raises(RequestError, match="binary_data"):
        oip.answer(request, "m", 1, many)


@pytest.mark.parametrize(
    ("data", "count", "good"),
    [
        (b"\x02\x00\x00\x00ab\x01\x00\x00\x00c", 2, True),
        (b"\x00\x00\x00\x00", 1, True),
        (b"\x02\x00\x00\x00ab", 2, False),
        (b"\xff\xff\xff\xffab", 1, False),
        (b"\x02\x00\x00\x00abc", 1, False),
        (b"", 0, False),
    ],
)
def test_files_are_sent_as_bytes_tensors(data: bytes, count: int, good: bool) -> None:
    tensor = {"name": "f", "datatype": "BYTES", "shape": [count], "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [tensor]}).encode()
    body = memoryview(head + data)
    if good:
        files = oip.read_request(body, str(len(head))).inputs["f"]
        assert isinstance(files, list)
        assert len(files) == count
    else:
        with pytest.raises(RequestError):
            oip.read_request(body, str(len(head)))


def body_of(values: NDArray[np.float32], **more: object) -> tuple[bytes, str]:
    """Return the JSON, and its length, of a client that sends and requests binary data."""
    size = {"binary_data_size": values.nbytes}
    tensor = {"name": "x", "datatype": "FP32", "shape": list(values.shape), "parameters": size}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}, **more}).encode()
    return head, str(len(head))


def test_tensors_after_repeated_json_are_read_anew() -> None:
    for start in range(3):
        values = np.arange(start, start + 4, dtype=np.float32)[None]
        head, length = body_of(values)
        inputs = oip.read_request(memoryview(head + values.tobytes()), length).inputs
        assert np.array_equal(np.asarray(inputs["x"]), values)


def test_repeated_json_before_binary_data_of_another_length_is_refused() -> None:
    values = np.zeros((1, 4), np.float32)
    head, length = body_of(values)
    for data, good in ((values.tobytes(), True), (values.tobytes()[1:], False), (values.tobytes() + b"x", False)):
        with nullcontext() if good else pytest.raises(RequestError, match="binary data"):
            oip.read_request(memoryview(head + data), length)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (0,), ()])
@pytest.mark.parametrize("more", [{}, {"id": "seven"}])
def test_a_binary_answer_states_its_own_outputs(shape: tuple[int, ...], more: dict[str, str]) -> None:
    head, length = body_of(np.zeros((1, 4), np.float32), **more)
    request = oip.read_request(memoryview(head + bytes(16)), length)
    for release, values in ((1, np.ones(shape, np.float16)), (2, np.ones(shape, np.int8))):
        response = oip.answer(request, "m", release, {"y": values})
        size, datatype = {"binary_data_size": values.nbytes}, {1: "FP16", 2: "INT8"}[release]
        output = {"name": "y", "datatype": datatype, "shape": list(shape), "parameters": size}
        assert json.loads(bytes(response.parts[0])) == {
            "model_name": "m", "model_version": str(release), "outputs": [output], **more,
        }  # fmt: skip
        assert bytes(response.parts[1]) == values.tobytes()


def of_json(shape: list[int], data: object) -> oip.InputValues:
    entry = {"name": "t", "datatype": "BYTES", "shape": shape, "data": data}
    return oip.read_request(memoryview(json.dumps({"inputs": [entry]}).encode()), None).inputs["t"]


def test_strings_in_json_are_read_as_texts() -> None:
    assert of_json([2], ["grün", ""]) == ["grün".encode(), b""]


@pytest.mark.parametrize(
    ("shape", "data", "message"),
    [
        ([2], ["one"], "is not 2 strings"),
        ([1], [1], "is not 1 string;"),
        ([1], "one", "is not 1 string;"),
        ([0], [], "may have 1 to 1024"),
        ([1], ["\ud800"], "is not valid Unicode"),
        ([21], ["x" * 60_000] + [""] * 20, "differ too much in length"),
    ],
)
def test_data_that_are_not_a_list_of_texts_are_refused(shape: list[int], data: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        of_json(shape, data)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_an_empty_output_is_answered_without_classes(shape: tuple[int, ...]) -> None:
    head = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}
    head |= {"outputs": [{"name": "y", "parameters": {"classification": 2}}]}  # type: ignore[dict-item]
    request = oip.read_request(memoryview(json.dumps(head).encode()), None)
    answer = oip.answer(request, "m", 1, {"y": np.zeros(shape, np.float32)})
    (output,) = json.loads(bytes(answer.parts[0]))["outputs"]
    assert (output["shape"], output["data"]) == ([*shape[:-1], min(2, shape[-1])], [])

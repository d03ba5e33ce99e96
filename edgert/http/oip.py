"""The bodies of requests and answers: JSON, and Triton's binary tensor extension. No sockets.

https://github.com/kserve/open-inference-protocol (JSON) and
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md: the JSON comes
first, `Inference-Header-Content-Length` is its length, and the tensors' bytes follow in the order of the JSON.

Numbers from JSON need many times their own size as Python objects. So the number of values is limited, and only one
thread at a time reads or writes long JSON. This costs no time, because Python runs one thread at a time anyway. A shape
in a request allocates no memory until the values are counted.

The client of a camera or a sensor sends the same JSON with each tensor. So a cache has the parsed form of short JSON
before binary data. Another cache has the JSON of binary answers.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.errors import RequestError
from edgert.http.messages import BINARY_TYPE, JSON_TYPE, HttpResponse
from edgert.printable import counted
from edgert.protocol.arrays import bytes_of
from edgert.protocol.wire import TENSORS_MAX
from edgert.tensors import DATATYPES, MAX_RANK, NUMPY_NAMES

LENGTH_HEADER = "Inference-Header-Content-Length"
JSON_BYTES_MAX = 4 * 1024**2
JSON_VALUES_MAX = 1024**2  # values in one answer
SHORT_JSON = 16 * 1024  # up to this number of bytes to read, or of values to write, no lock is needed
CACHED_JSON_BYTES_MAX = 2048  # the largest JSON that is cached
CACHED_MAX = 64  # the number of entries of each of the two caches
ID_LENGTH_MAX = 1024
CLASSES_MAX = 10_000
FILES_MAX = 1024
# Files become rows of one array, padded to the longest file.
PADDED_BYTES_MIN = 1024**2  # an array of at most this size is always accepted
PADDED_TIMES_MAX = 8  # a larger array may have at most this multiple of the sent bytes
VALUES_MAX = 2**32  # the limit for the number of values in a shape; an axis of length 0 is counted as 1
# The limits of long JSON. Lists and strings are counted before JSON is parsed, because each becomes an object.
LISTS_MAX = 256 * 1024
STRINGS_MAX = 2048

InputValues = NDArray[Any] | list[bytes]

# The types of JSON values that fit an array of each kind.
_KINDS: dict[str, set[type]] = {"f": {int, float}, "i": {int}, "u": {int}, "b": {int, bool}}

_long_json = threading.Lock()


class RequestedOutput(NamedTuple):
    """One requested output. If `classes` is above 0, only the `classes` largest values are sent."""

    name: str
    binary: bool
    classes: int = 0


class BinaryInput(NamedTuple):
    """An input in the binary data, from byte `begin` to byte `end`. `dtype` None means BYTES."""

    name: str
    dtype: np.dtype[Any] | None
    shape: list[int]
    begin: int
    end: int

    def values(self, data: memoryview) -> InputValues:
        """Return the input's values, as a view of `data`. Raises RequestError if lengths of BYTES are wrong."""
        own = data[self.begin : self.end]
        if self.dtype is None:
            return _files(self.name, own, math.prod(self.shape))
        return np.frombuffer(own, self.dtype).reshape(self.shape)


class InferRequest(NamedTuple):
    """One inference request.

    Attributes:
        id: The client's id of the request, for the response; "" for no id.
        outputs: The requested outputs; None for all outputs.
        binary: Whether outputs are sent as binary data by default.
        priority: A priority of Triton: 0 is the default, 1 the highest.
        timeout_s: The time-out of the request; None for the server's default.
    """

    inputs: dict[str, InputValues]
    id: str
    outputs: tuple[RequestedOutput, ...] | None
    binary: bool
    priority: int
    timeout_s: float | None


def read_request(body: memoryview, json_length: str | None) -> InferRequest:
    """Parse `body`; the arrays are views of it. Raises RequestError."""
    header, data = _split(body, json_length)
    if data and len(header) <= CACHED_JSON_BYTES_MAX:
        in_data, request = _cached_request(bytes(header), len(data))
    else:
        with _long_json if len(header) > SHORT_JSON else contextlib.nullcontext():
            in_data, request = _request(bytes(header), len(data))
    if not in_data:
        return request
    return request._replace(inputs={**request.inputs, **{each.name: each.values(data) for each in in_data}})


def _request(text: bytes, data_bytes: int) -> tuple[list[BinaryInput], InferRequest]:
    """Return the inputs in the `data_bytes` of binary data, and the request without these inputs."""
    if len(text) > SHORT_JSON:
        _check(
            text.count(b"[") + text.count(b"{") <= LISTS_MAX, f"the JSON has more than {LISTS_MAX} lists and objects"
        )
        _check(text.count(b'"') <= 2 * STRINGS_MAX, f"the JSON has more than {STRINGS_MAX} strings")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    _check(isinstance(value, dict), "the body must be a JSON object")
    entries = value.get("inputs")
    _check(
        isinstance(entries, list) and 0 < len(entries) <= TENSORS_MAX, f"'inputs' must list 1 to {TENSORS_MAX} tensors"
    )
    parameters = _parameters(value, "the request")
    _check(
        not parameters.get("sequence_id"),
        "sequences of requests are not supported over HTTP: leave 'sequence_id' out, or open a session through the local socket",
    )
    binary = parameters.get("binary_data_output", False) is True
    in_data, inputs = _inputs(entries, data_bytes)
    request_id = value.get("id", "")
    _check(isinstance(request_id, str) and len(request_id) <= ID_LENGTH_MAX, "'id' must be a short string")
    timeout_us = _whole_number(parameters.get("timeout", 0), "the parameter 'timeout' (microseconds)")
    return in_data, InferRequest(
        id=request_id,
        inputs=inputs,
        outputs=_requested_outputs(value.get("outputs"), binary),
        binary=binary,
        priority=_whole_number(parameters.get("priority", 0), "the parameter 'priority'"),
        timeout_s=timeout_us / 1e6 if timeout_us else None,
    )


def _inputs(entries: list[Any], data_bytes: int) -> tuple[list[BinaryInput], dict[str, InputValues]]:
    """Return the inputs in the `data_bytes` of binary data, and the values of the inputs in JSON by name."""
    names: set[str] = set()
    in_json: dict[str, InputValues] = {}
    in_data: list[BinaryInput] = []
    offset = 0
    for entry in entries:
        name, tensor = _input(entry, data_bytes, offset)
        _check(name not in names, f"input {name!r} is given twice")
        names.add(name)
        if isinstance(tensor, BinaryInput):
            in_data.append(tensor)
            offset = tensor.end
        else:
            in_json[name] = tensor
    _check(offset == data_bytes, f"the inputs state {offset} bytes of binary data, the body has {data_bytes}")
    return in_data, in_json


_cached_request = lru_cache(CACHED_MAX)(_request)


def answer(
    request: InferRequest, model: str, release: int, outputs: Mapping[str, NDArray[Any]], labels: Sequence[str] = ()
) -> HttpResponse:
    """Return the response. `labels` apply to outputs with as many classes. Raises RequestError."""
    requested = request.outputs
    if requested is None:
        requested = tuple([RequestedOutput(name, request.binary) for name in outputs])
    for output in requested:
        if output.name not in outputs:
            raise RequestError(f"model {model} has no output {output.name[:200]!r}; it has {', '.join(outputs)}")
    if all(output.binary and not output.classes for output in requested):
        arrays = [outputs[output.name] for output in requested]
        forms = tuple((output.name, array.dtype, array.shape) for output, array in zip(requested, arrays, strict=True))
        return _response([_cached_head(request.id, model, release, forms), *map(bytes_of, arrays)])
    values = sum(_values(output, outputs[output.name]) for output in requested)
    if values > JSON_VALUES_MAX:
        raise RequestError(f"the answer has {values} values, in JSON at most {JSON_VALUES_MAX}: request binary_data")
    with _long_json if values > SHORT_JSON else contextlib.nullcontext():
        entries = [_output_json(output, outputs[output.name], labels) for output in requested]
        head = _head(request.id, model, release, [entry for entry, _ in entries])
    return _response([head, *(data for _, data in entries if data is not None)])


def _response(parts: list[bytes | memoryview]) -> HttpResponse:
    """Return the response with these parts: first JSON, then binary data."""
    if len(parts) == 1:
        return HttpResponse(200, parts, JSON_TYPE)
    return HttpResponse(200, parts, BINARY_TYPE, ((LENGTH_HEADER, str(len(parts[0]))),))


def _head(request_id: str, model: str, release: int, entries: list[dict[str, Any]]) -> bytes:
    head: dict[str, Any] = {"model_name": model, "model_version": str(release), "outputs": entries}
    if request_id:
        head["id"] = request_id
    return json.dumps(head, allow_nan=False).encode()


@lru_cache(CACHED_MAX)
def _cached_head(
    request_id: str, model: str, release: int, forms: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]
) -> bytes:
    """Return the JSON of an answer whose outputs all follow as binary data."""
    return _head(request_id, model, release, [_binary_entry(*form) for form in forms])


def _values(output: RequestedOutput, array: NDArray[Any]) -> int:
    """Return the number of values of `array` that become Python objects."""
    if output.classes:
        return array.size // max(1, array.shape[-1]) * output.classes if array.ndim else 1
    return 0 if output.binary else array.size


def _split(body: memoryview, json_length: str | None) -> tuple[memoryview, memoryview]:
    length = len(body)
    if json_length is not None:
        # isdecimal alone would also accept digits of other scripts, and very long numbers.
        if not (json_length.isascii() and json_length.isdecimal() and len(json_length) < 20):
            raise RequestError(f"{LENGTH_HEADER} must be a number")
        length = int(json_length)
        if length > len(body):
            raise RequestError(f"{LENGTH_HEADER} states {length} bytes, but the body has {len(body)}")
    if length > JSON_BYTES_MAX:
        raise RequestError(f"the JSON of a request may have {JSON_BYTES_MAX} bytes: send tensors as binary data")
    return body[:length], body[length:]


def _input(entry: Any, data_bytes: int, offset: int) -> tuple[str, InputValues | BinaryInput]:
    """Return an input's name and values; for binary data, return its range, which begins at `offset`."""
    _check(isinstance(entry, dict) and isinstance(entry.get("name"), str), "each input must be an object with a 'name'")
    name, datatype, shape = entry["name"][:200], entry.get("datatype"), entry.get("shape")
    if not isinstance(datatype, str) or (datatype not in NUMPY_NAMES and datatype != "BYTES"):
        known = ", ".join(NUMPY_NAMES)
        raise RequestError(f"input {name!r} has datatype {str(datatype)[:40]!r}; known: {known}, BYTES")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_length, shape)):
        raise RequestError(f"input {name!r} has no usable 'shape': at most {MAX_RANK} lengths, each 0 or more")
    if math.prod(length or 1 for length in shape) >= VALUES_MAX:
        raise RequestError(f"input {name!r}: the shape {shape} is too large")
    parameters = _parameters(entry, f"input {name!r}")
    _check("shared_memory_region" not in parameters, "shared memory regions are not supported: send the data")
    if "binary_data_size" not in parameters:
        if datatype == "BYTES":
            return name, _texts(name, entry.get("data"), math.prod(shape))
        return name, _from_json(name, entry.get("data"), np.dtype(NUMPY_NAMES[datatype]), datatype, shape)
    size = _whole_number(parameters["binary_data_size"], f"'binary_data_size' of input {name!r}")
    _check("data" not in entry, f"input {name!r} has both 'data' and 'binary_data_size'")
    _check(offset + size <= data_bytes, f"the body ends within the binary data of input {name!r}")
    if datatype == "BYTES":
        return name, BinaryInput(name, None, shape, offset, offset + size)
    dtype = np.dtype(NUMPY_NAMES[datatype])
    takes = math.prod(shape) * dtype.itemsize
    if size != takes:
        raise RequestError(f"input {name!r} has {datatype} {shape}, which has {takes} bytes, not {size}")
    return name, BinaryInput(name, dtype, shape, offset, offset + size)


def _texts(name: str, data: Any, count: int) -> list[bytes]:
    """Return the strings of a BYTES tensor in JSON: texts, for models that read text."""
    strings = isinstance(data, list) and len(data) == count and all(isinstance(text, str) for text in data)
    _check(strings, f"the data of input {name!r} is not {counted(count, 'string')}; send other BYTES as binary data")
    _check(0 < count <= FILES_MAX, f"input {name!r} has {count} texts; it may have 1 to {FILES_MAX}")
    try:
        texts = [text.encode() for text in data]
    except UnicodeEncodeError as error:
        raise RequestError(f"a text of input {name!r} is not valid Unicode: {error.reason}") from error
    return _padded_alike(name, texts, sum(map(len, texts)))


def _files(name: str, data: memoryview, count: int) -> list[bytes]:
    """Return the elements of a BYTES tensor: files, each after its length in 4 bytes."""
    _check(0 < count <= FILES_MAX, f"input {name!r} has {count} files; it may have 1 to {FILES_MAX}")
    files: list[bytes] = []
    offset = 0
    while offset + 4 <= len(data) and len(files) < count:
        length = int.from_bytes(data[offset : offset + 4], "little")
        files.append(bytes(data[offset + 4 : offset + 4 + length]))
        offset += 4 + length
    _check(offset == len(data) and len(files) == count, f"the lengths in the BYTES of input {name!r} are wrong")
    return _padded_alike(name, files, len(data))


def _padded_alike(name: str, files: list[bytes], sent_bytes: int) -> list[bytes]:
    _check(
        len(files) * max(map(len, files)) <= max(PADDED_BYTES_MIN, PADDED_TIMES_MAX * sent_bytes),
        f"the elements of input {name!r} differ too much in length: send one at a time",
    )
    return files


def _from_json(name: str, data: Any, dtype: np.dtype[Any], datatype: str, shape: list[int]) -> NDArray[Any]:
    """Return JSON numbers, nested like the shape or flat, as an array. Integers are never rounded to fit."""
    _check(isinstance(data, list), f"input {name!r} has no 'data'")
    flat: list[Any] | None = _flat(data, shape) if data and type(data[0]) is list else data
    count = math.prod(shape)
    if flat is None or len(flat) != count:
        raise RequestError(
            f"the data of input {name!r} is not {counted(count, 'value')}, flat or nested like its shape {shape}"
        )
    _check(set(map(type, flat)) <= _KINDS[dtype.kind], f"the data of input {name!r} does not fit {datatype}")
    if dtype.kind == "f":
        try:
            wide = np.array(flat, np.float64)
        except OverflowError as error:
            raise RequestError(f"the data of input {name!r} does not fit {datatype}: {error}") from error
        with np.errstate(over="ignore"):  # a value that is too large for a float becomes infinite, as usual
            return wide.astype(dtype).reshape(shape)
    low, high = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    _check(not flat or low <= min(flat) <= max(flat) <= high, f"the data of input {name!r} does not fit {datatype}")
    return np.array(flat, dtype).reshape(shape)


def _flat(data: list[Any], shape: list[int]) -> list[Any] | None:
    """Return the values of lists that are nested like `shape`; None if `data` is nested in another way."""
    level: list[Any] = [data]
    for length in shape:
        if not all(type(row) is list and len(row) == length for row in level):
            return None
        level = list(chain.from_iterable(level))
    return level


def _requested_outputs(entries: Any, binary: bool) -> tuple[RequestedOutput, ...] | None:
    if entries is None or entries == []:
        return None
    _check(
        isinstance(entries, list) and len(entries) <= TENSORS_MAX, f"'outputs' must list at most {TENSORS_MAX} tensors"
    )
    requested = []
    for entry in entries:
        _check(
            isinstance(entry, dict) and isinstance(entry.get("name"), str),
            "each output must be an object with a 'name'",
        )
        parameters = _parameters(entry, f"output {entry['name'][:200]!r}")
        _check("shared_memory_region" not in parameters, "shared memory regions are not supported")
        classes = _whole_number(parameters.get("classification", 0), "the parameter 'classification'")
        _check(classes <= CLASSES_MAX, f"the parameter 'classification' is at most {CLASSES_MAX}")
        requested.append(RequestedOutput(entry["name"], parameters.get("binary_data", binary) is True, classes))
    return tuple(requested)


def _output_json(
    output: RequestedOutput, array: NDArray[Any], labels: Sequence[str]
) -> tuple[dict[str, Any], bytes | memoryview | None]:
    """Return the JSON of an output, and its binary data; None if the JSON has the values."""
    if output.classes:
        return _classified(output, array, labels)
    if output.binary:
        return _binary_entry(output.name, array.dtype, array.shape), bytes_of(array)
    flat = array.ravel()
    values = flat.tolist()
    if array.dtype.kind == "f" and not np.isfinite(flat).all():  # JSON has no NaN and no infinity
        values = [value if math.isfinite(value) else None for value in values]
    return {**_entry(output.name, array.dtype, array.shape), "data": values}, None


def _entry(name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> dict[str, Any]:
    return {"name": name, "datatype": DATATYPES[dtype.name], "shape": list(shape)}


def _binary_entry(name: str, dtype: np.dtype[Any], shape: Sequence[int]) -> dict[str, Any]:
    return {**_entry(name, dtype, shape), "parameters": {"binary_data_size": math.prod(shape) * dtype.itemsize}}


def _classified(
    output: RequestedOutput, array: NDArray[Any], labels: Sequence[str]
) -> tuple[dict[str, Any], bytes | memoryview | None]:
    """Return the largest values of each item as `value:index[:label]`: Triton's classification extension."""
    if not array.ndim:
        raise RequestError(f"output {output.name!r} has no classes: omit `classification`")
    rows = array.reshape(math.prod(array.shape[:-1]), array.shape[-1])  # -1 would not work for an axis of 0
    named = len(labels) == array.shape[-1]
    texts: list[str] = []
    for row in rows:
        for index in np.argsort(-row.astype(np.float64), kind="stable")[: output.classes]:
            texts.append(f"{row[index]:f}:{index}" + (f":{labels[index]}" if named else ""))
    shape = [*array.shape[:-1], min(output.classes, array.shape[-1])]
    entry: dict[str, Any] = {"name": output.name, "datatype": "BYTES", "shape": shape}
    if not output.binary:
        return {**entry, "data": texts}, None
    data = b"".join(len(raw).to_bytes(4, "little") + raw for raw in (text.encode() for text in texts))
    return {**entry, "parameters": {"binary_data_size": len(data)}}, data


def _parameters(value: dict[str, Any], where: str) -> dict[str, Any]:
    parameters = value.get("parameters", {})
    _check(isinstance(parameters, dict), f"'parameters' of {where} must be an object")
    return dict(parameters)


def _whole_number(value: Any, what: str) -> int:
    _check(_is_length(value), f"{what} must be a whole number, 0 or more")
    return int(value)


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _check(good: bool, message: str) -> None:
    if not good:
        raise RequestError(message)

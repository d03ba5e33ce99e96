"""The Open Inference Protocol over HTTP against the real daemon, by hand and with Triton's client."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import json
import os
import signal
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgert.bundle.bundle_file import write_bundle
from edgert.bundle.manifest import Accuracy, ArtifactEntry, FileEntry, Manifest, TargetEntry
from edgert.config import read_config
from edgert.http.endpoints import Endpoints, is_local_name
from edgert.http.messages import HttpRequest, HttpResponse
from edgert.protocol.control import ask
from edgert.tensors import NUMPY_NAMES, InferResponse, StageTimes, TensorSpec
from edgert.versions.install import install
from edgert.versions.slot_store import SlotStore
from tests.support.bundles import _laid_out, _npy
from tests.support.clients import halted
from tests.support.devices import WAIT_S_MAX, Device, a_device, http_pid, http_port, wait_until
from tests.support.http_requests import Answer, binary_body, json_input, read_answer

pytest.importorskip("httptools", reason="the HTTP server needs the extra edgert[http]")

FRAME_BYTES = 1024**2
CONFIG = """
[serving]
frame_mb = 1
cache_mb = 0
queue_max = 2
batch_max = 1
[http]
listen = "127.0.0.1:0"
connections_max = 8
timeout_s = 60.0
"""
SLOW_S = 0.3
TYPES = {name: np.dtype(numpy_name) for name, numpy_name in NUMPY_NAMES.items()}


@dataclass
class Site:
    """A device whose daemon serves HTTP at `port`."""

    device: Device
    port: int

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S_MAX)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def infer(self, value: Any, model: str = "echo") -> Answer:
        return self.ask("POST", f"/v2/models/{model}/infer", json.dumps(value).encode())

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S_MAX)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with a_device(CONFIG) as device:
        device.put()
        device.put(model="slow", delay_s=SLOW_S)
        put_types(device)
        yield Site(device, http_port(device))


def test_after_inferences_the_connections_are_closed_and_their_memory_is_given_back(site: Site) -> None:
    with site.device.client() as client:
        endpoints = Endpoints(client, site.device.state.control_socket, host_checked=True, inferences_max=1)
        before = site.device.serving()["connections"]
        body = memoryview(json.dumps({"inputs": [json_input(np.zeros((1, 4), np.float32))]}).encode())
        assert endpoints.handle(HttpRequest("POST", "/v2/models/echo/infer", {}, body)).status == 200
        assert site.device.serving()["connections"] == before + 1
        assert [endpoints.release_memory(), endpoints.release_memory()] == [False, True]
        wait_until(lambda: site.device.serving()["connections"] == before, "its connection is closed")
        assert endpoints.handle(HttpRequest("POST", "/v2/models/echo/infer", {}, body)).status == 200


def test_a_model_whose_worker_hangs_is_not_ready(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgert.http.endpoints.READY_S_MAX", 0.3)
    with site.device.client() as client:
        endpoints = Endpoints(client, site.device.state.control_socket, host_checked=True, inferences_max=1)

        def ready(path: str) -> tuple[int, bytes]:
            answered = endpoints.handle(HttpRequest("GET", path, {}, memoryview(b"")))
            return answered.status, bytes(answered.parts[0])

        paths = ("/v2/health/ready", "/v2/models/echo/ready")
        pid = site.device.serving()["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            found = [ready(path) for path in paths]
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [status for status, _ in found] == [503, 503]
        assert all(b"the worker of model echo does not react" in body for _, body in found)
        wait_until(lambda: [ready(path)[0] for path in paths] == [200, 200], "the worker reacts again")


def test_all_workers_are_asked_at_once_whether_they_react(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgert.http.endpoints.READY_S_MAX", 0.3)
    with site.device.client() as client:
        endpoints = Endpoints(client, site.device.state.control_socket, host_checked=True, inferences_max=1)
        pids = [site.device.serving(model)["pid"] for model in ("echo", "slow")]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            answered = endpoints.handle(HttpRequest("GET", "/v2/health/ready", {}, memoryview(b"")))
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
    assert answered.status == 503
    for model in ("echo", "slow"):
        assert f"the worker of model {model} does not react".encode() in bytes(answered.parts[0])
    wait_until(lambda: site.ask("GET", "/v2/health/ready").status == 200, "the workers react again")


def test_an_answer_of_a_release_that_was_replaced_during_the_request_is_not_mixed_with_the_next_release() -> None:
    live = [1]

    def infer(*_: Any, **options: Any) -> InferResponse:
        answered, live[0] = live[0], 2  # a new release becomes live just after the answer
        return InferResponse("echo", answered, {"y": np.eye(2, dtype=np.float32)[:1]}, StageTimes(), 1, False)

    client = SimpleNamespace(
        infer=infer,
        models=lambda: [{"name": "echo", "release": live[0] - 1, "state": "ready"}],
        metadata=lambda model: {"release": live[0], "labels": [f"release {live[0]}", "other"]},
    )
    endpoints = Endpoints(client, Path("none.sock"), host_checked=True, inferences_max=1)  # type: ignore[arg-type]
    outputs = [{"name": "y", "parameters": {"classification": 1}}]
    inputs = [json_input(np.zeros((1, 4), np.float32))]
    body = memoryview(json.dumps({"inputs": inputs, "outputs": outputs}).encode())

    def asked(path: str) -> HttpResponse:
        return endpoints.handle(HttpRequest("POST", path, {}, body))

    refused = asked("/v2/models/echo/infer")
    assert (refused.status, b"release 2 replaced release 1" in refused.parts[0]) == (503, True)
    answered = asked("/v2/models/echo/infer")
    assert (answered.status, b"release 2" in answered.parts[0]) == (200, True)
    refused = asked("/v2/models/echo/versions/1/infer")  # release 1 was live when the request arrived
    assert (refused.status, b"is not served in version '1'" in refused.parts[0]) == (404, True)


def test_the_http_process_runs_on_one_core(site: Site) -> None:
    cores = []
    for thread in os.listdir(f"/proc/{http_pid(site.device)}/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread of a connection that has ended
            cores.append(os.sched_getaffinity(int(thread)))
    assert len(cores) > 1
    assert all(each == {max(os.sched_getaffinity(0))} for each in cores)


def put_types(device: Device) -> None:
    """Install a model that copies inputs of every datatype to outputs."""
    folder = device.folder / "types"
    golden = {name: np.array([[0, 1], [1, 0]]).astype(dtype) for name, dtype in TYPES.items()}
    contents = {f"golden/{name.lower()}.npy": _npy(array) for name, array in golden.items()}
    contents["null/model.json"] = json.dumps({"op": "copy"}).encode()
    manifest = Manifest(
        model="types",
        release=3,
        inputs=tuple(TensorSpec(f"in_{name}", name, (-1, 2)) for name in TYPES),
        outputs=tuple(TensorSpec(f"out_{name}", name, (-1, 2)) for name in TYPES),
        files=tuple(FileEntry(p, len(data), hashlib.sha256(data).hexdigest()) for p, data in contents.items()),
        artifacts=(
            ArtifactEntry(
                id="null",
                engine="null",
                precision="fp32",
                entry="null/model.json",
                files=("null/model.json",),
                golden_outputs=tuple(f"golden/{name.lower()}.npy" for name in TYPES),
                golden_atol=tuple(0.0 for _ in TYPES),
                accuracy=Accuracy("top1", samples=2, fp32=1.0, artifact=1.0, max_drop=0.01),
                tools={"null": "1"},
            ),
        ),
        targets=(TargetEntry("this-machine", (), ("null",)),),
        golden_inputs=tuple(f"golden/{name.lower()}.npy" for name in TYPES),
        source_sha256=hashlib.sha256(b"").hexdigest(),
        source_size_bytes=0,
    )
    folder.mkdir()
    bundle = folder / "types.edgert"
    write_bundle(bundle, manifest, _laid_out(folder / "files", contents), device.key)
    install(bundle, device.state, read_config(device.state))
    store = SlotStore(device.state.models / "types")
    store.activate(60)
    device.sync("types")
    store.mark_good()


ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


# --- descriptions ----------------------------------------------------------------------------


def test_the_server_describes_itself_and_a_model(site: Site) -> None:
    assert site.ask("GET", "/v2").json["name"] == "edgert"
    assert site.ask("GET", "/v2/health/live").status == 200
    assert site.ask("GET", "/v2/health/ready").status == 200
    assert site.ask("HEAD", "/v2/health/ready").body == b""
    assert site.ask("GET", "/v2/models/echo").json == {
        "name": "echo",
        "versions": ["1"],
        "platform": "edgert_null",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
    }
    assert site.ask("GET", "/v2/models/types/versions/3/ready").status == 200
    assert site.ask("GET", "/v2/models/types/versions/3").json["versions"] == ["3"]
    config = site.ask("GET", "/v2/models/echo/config").json
    assert config["max_batch_size"] == 1024
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}]
    index = {entry["name"]: entry for entry in site.ask("POST", "/v2/repository/index").json}
    assert index["echo"] == {"name": "echo", "version": "1", "state": "READY", "reason": ""}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/nobody", 404),
        ("GET", "/v2/models/nobody/ready", 404),
        ("GET", "/v2/models/nobody/stats", 404),
        ("POST", "/v2/models/nobody/infer", 404),
        ("GET", "/v2/models/echo/versions/7", 404),
        ("GET", "/v2/models/echo/versions/7/ready", 404),
        ("POST", "/v2/models/echo/versions/7/infer", 404),
        ("GET", "/v2/models/echo/infer", 405),
        ("POST", "/v2/health/live", 405),
        ("GET", "/v3", 404),
        ("GET", "/", 404),
        ("GET", "/v2/models/echo/nothing", 404),
        ("GET", "/v2/models/%00%ff", 404),
    ],
)
def test_a_request_with_an_unknown_path_or_model_or_method_is_refused_with_a_reason(
    site: Site, method: str, path: str, status: int
) -> None:
    body = json.dumps({"inputs": [json_input(ROWS)]}).encode() if method == "POST" else None
    answer = site.ask(method, path, body)
    assert answer.status == status
    assert answer.json["error"]


# --- inference --------------------------------------------------------------------------------


def test_nested_and_flat_json_tensors_are_read(site: Site) -> None:
    nested = {**json_input(ROWS), "data": ROWS.tolist()}
    for tensor in (json_input(ROWS), nested):
        answer = site.infer({"id": "seven", "inputs": [tensor]})
        assert answer.status == 200
        assert answer.json == {
            "model_name": "echo",
            "model_version": "1",
            "id": "seven",
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [2, 4], "data": ROWS.ravel().tolist()}],
        }


def test_binary_tensors_are_read_and_answered(site: Site) -> None:
    body, headers = binary_body(ROWS)
    answer = site.ask("POST", "/v2/models/echo/versions/1/infer", body, headers)
    assert answer.status == 200
    length = int(answer.headers["inference-header-content-length"])
    head = json.loads(answer.body[:length])
    assert head["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [2, 4], "parameters": {"binary_data_size": 32}}
    ]
    assert np.array_equal(np.frombuffer(answer.body[length:], np.float32).reshape(2, 4), ROWS)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_bodies_are_read(site: Site, encoding: str) -> None:
    body, headers = binary_body(ROWS)
    packed = gzip.compress(body) if encoding == "gzip" else zlib.compress(body)
    answer = site.ask("POST", "/v2/models/echo/infer", packed, {**headers, "Content-Encoding": encoding})
    assert answer.status == 200
    assert answer.body.endswith(ROWS.tobytes())


def test_chunked_pipelined_and_continued_requests_share_a_connection(site: Site) -> None:
    body, headers = binary_body(ROWS)
    length = headers["Inference-Header-Content-Length"]
    start = f"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nInference-Header-Content-Length: {length}\r\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (body[:7], body[7:90], body[90:])) + b"0\r\n\r\n"
    chunked = start.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
    plain = start.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with site.connect() as sock, sock.makefile("rb") as file:
        sock.sendall(chunked + plain + chunked)
        for _ in range(3):
            assert read_answer(file).body.endswith(ROWS.tobytes())
        for part in (chunked[:-30], chunked[-30:-9], chunked[-9:], plain[:40], plain[40:-5], plain[-5:]):
            sock.sendall(part)
            time.sleep(0.02)
        for _ in range(2):
            assert read_answer(file).body.endswith(ROWS.tobytes())
        sock.sendall(start.encode() + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert file.readline() + file.readline() == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert read_answer(file).body.endswith(ROWS.tobytes())


def test_outputs_can_be_chosen_and_classified(site: Site) -> None:
    values = np.array([[1, 9, 3, 4], [8, 5, 6, 7]], dtype=np.float32)
    wanted = {"name": "y", "parameters": {"classification": 2}}
    answer = site.infer({"inputs": [json_input(values)], "outputs": [wanted]})
    assert answer.json["outputs"] == [
        {
            "name": "y",
            "datatype": "BYTES",
            "shape": [2, 2],
            "data": ["9.000000:1", "4.000000:3", "8.000000:0", "7.000000:3"],
        }
    ]
    assert site.infer({"inputs": [json_input(values)], "outputs": [{"name": "z"}]}).status == 400


def test_every_datatype_is_read_and_answered_as_json_and_as_binary_data(site: Site) -> None:
    arrays = {name: np.array([[0, 1]]).astype(dtype) for name, dtype in TYPES.items()}
    arrays["UINT64"] = np.array([[1, 2**64 - 1]], dtype=np.uint64)
    arrays["INT64"] = np.array([[-(2**63), 2**63 - 1]], dtype=np.int64)
    answer = site.infer({"inputs": [json_input(a, f"in_{n}", n) for n, a in arrays.items()]}, "types")
    assert answer.status == 200, answer.body
    given = {output["name"]: output for output in answer.json["outputs"]}
    for name, array in arrays.items():
        assert np.array_equal(np.array(given[f"out_{name}"]["data"], array.dtype), array[0])


# --- requests that are wrong ------------------------------------------------------------------

BAD_BODIES: dict[str, Any] = {
    "nothing": b"",
    "no json": b"{inputs",
    "deep": b"[" * 100_000,
    "no object": b"[1]",
    "no utf-8": b"\xff\xfe{}",
    "huge number": b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [' + b"9" * 5000 + b"]}]}",
    "no inputs": {},
    "inputs no list": {"inputs": 3},
    "input no object": {"inputs": [3]},
    "many inputs": {"inputs": [json_input(ROWS)] * 33},
    "twice": {"inputs": [json_input(ROWS)] * 2},
    "other name": {"inputs": [json_input(ROWS, "z")]},
    "other type": {"inputs": [json_input(ROWS, datatype="INT8")]},
    "no such type": {"inputs": [json_input(ROWS, datatype="FP4")]},
    "negative shape": {"inputs": [{**json_input(ROWS), "shape": [-2, -4]}]},
    "huge shape": {"inputs": [{**json_input(ROWS), "shape": [2**62, 2**62]}]},
    "shape of floats": {"inputs": [{**json_input(ROWS), "shape": [2.0, 4]}]},
    "too few values": {"inputs": [{**json_input(ROWS), "data": [1]}]},
    "ragged": {"inputs": [{**json_input(ROWS), "data": [[1, 2], [3]]}]},
    "strings": {"inputs": [{**json_input(ROWS), "data": ["1"] * 8}]},
    "nulls": {"inputs": [{**json_input(ROWS), "data": [None] * 8}]},
    "wrong row": {"inputs": [json_input(np.ones((2, 5), np.float32))]},
    "priority": {"inputs": [json_input(ROWS)], "parameters": {"priority": -1}},
    "timeout": {"inputs": [json_input(ROWS)], "parameters": {"timeout": "soon"}},
    "parameters": {"inputs": [json_input(ROWS)], "parameters": 3},
    "sequence": {"inputs": [json_input(ROWS)], "parameters": {"sequence_id": 5}},
    "shared memory": {"inputs": [{**json_input(ROWS), "parameters": {"shared_memory_region": "r"}}]},
    "id": {"id": 5, "inputs": [json_input(ROWS)]},
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_an_invalid_body_is_refused_as_an_error_of_the_client(site: Site, name: str) -> None:
    body = BAD_BODIES[name]
    answer = site.ask("POST", "/v2/models/echo/infer", body if isinstance(body, bytes) else json.dumps(body).encode())
    assert answer.status == 400, answer.body
    assert answer.json["error"]


@pytest.mark.parametrize("size", [0, 31, 33, 2**40, -32, 3.5, "32", True])
def test_false_binary_sizes_are_refused(site: Site, size: Any) -> None:
    body, headers = binary_body(ROWS, parameters={"binary_data_size": size})
    assert site.ask("POST", "/v2/models/echo/infer", body, headers).status == 400


@pytest.mark.parametrize("length", ["-1", "1e3", "99999", "9" * 40, "٣", ""])
def test_false_json_lengths_are_refused(site: Site, length: str) -> None:
    body, headers = binary_body(ROWS)
    headers["Inference-Header-Content-Length"] = length.encode().decode("latin-1")
    assert site.ask("POST", "/v2/models/echo/infer", body, headers).status == 400


def test_a_body_with_too_many_or_too_few_bytes_is_refused(site: Site) -> None:
    body, headers = binary_body(ROWS)
    assert site.ask("POST", "/v2/models/echo/infer", body + b"more", headers).status == 400
    assert site.ask("POST", "/v2/models/echo/infer", body[:-1], headers).status == 400


def test_integers_in_json_are_never_rounded_or_wrapped(site: Site) -> None:
    arrays = {name: np.array([[0, 1]]).astype(dtype) for name, dtype in TYPES.items()}
    for name, value in (("INT8", 128), ("UINT8", -1), ("INT32", 1.5), ("UINT64", 2**64), ("BOOL", 2), ("INT64", 2**63)):
        inputs = [json_input(a, f"in_{n}", n) for n, a in arrays.items()]
        next(i for i in inputs if i["datatype"] == name)["data"] = [0, value]
        answer = site.infer({"inputs": inputs}, "types")
        assert answer.status == 400, (name, answer.body)


def test_too_large_bodies_are_refused_before_they_are_read(site: Site) -> None:
    with site.connect() as sock, sock.makefile("rb") as file:
        sock.sendall(b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n")
        answer = read_answer(file)
    assert answer.status == 413
    assert str(FRAME_BYTES) in answer.json["error"]
    with site.connect() as sock, sock.makefile("rb") as file:
        sock.sendall(b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        sock.sendall(b"200000\r\n" + bytes(2 * FRAME_BYTES) + b"\r\n")
        assert read_answer(file).status == 413


def test_a_body_that_unpacks_to_too_many_bytes_is_refused(site: Site) -> None:
    bomb = gzip.compress(bytes(64 * FRAME_BYTES))
    answer = site.ask("POST", "/v2/models/echo/infer", bomb, {"Content-Encoding": "gzip"})
    assert answer.status == 413
    for encoding, status in (("br", 415), ("gzip", 400)):
        assert site.ask("POST", "/v2/models/echo/infer", b"abc", {"Content-Encoding": encoding}).status == status
    cut = gzip.compress(json.dumps({"inputs": [json_input(ROWS)]}).encode())[:-9]
    assert site.ask("POST", "/v2/models/echo/infer", cut, {"Content-Encoding": "gzip"}).status == 400


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X%d: 1\r\n" % i for i in range(200)) + b"\r\n", 431),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /v2 HTTP/1.1\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcd", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: a\r\nContent-Length: -4\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
    ],
)
def test_bytes_that_are_not_http_are_answered_with_the_reason_and_end_the_connection(
    site: Site, sent: bytes, status: int
) -> None:
    with site.connect() as sock, sock.makefile("rb") as file:
        sock.sendall(sent)
        assert read_answer(file).status == status
    assert site.ask("GET", "/v2").status == 200


# --- deadlines, overload, slow clients --------------------------------------------------------


def test_a_request_past_its_timeout_is_answered_504(site: Site) -> None:
    with halted(site.device, "slow"):
        answer = site.infer({"inputs": [json_input(ROWS)], "parameters": {"timeout": 20_000}}, "slow")
    assert answer.status == 504
    assert "error" in answer.json


def test_overload_is_answered_503_with_retry_after(site: Site) -> None:
    by_status: dict[int, list[Answer]] = {200: [], 503: []}

    def overloaded() -> bool:  # on a busy machine, six requests may come one after the other
        answers: list[Answer] = []
        tensors = [json_input(ROWS + i) for i in range(6)]  # one request runs, two wait, and the others are too many
        threads = [
            threading.Thread(target=lambda t: answers.append(site.infer({"inputs": [t]}, "slow")), args=(tensor,))
            for tensor in tensors
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for answer in answers:
            by_status[answer.status].append(answer)
        assert len(answers) == 6
        return bool(by_status[503])

    wait_until(overloaded, "too many requests at once")
    assert by_status[200]
    assert all(int(a.headers["retry-after"]) >= 1 for a in by_status[503])


def test_slow_clients_occupy_connections_only_while_they_stay(site: Site) -> None:
    drips = [site.connect() for _ in range(8)]  # the largest number of connections
    try:
        for sock in drips:
            sock.sendall(b"GET /v2 HTTP/1.1\r\nHost: local")
        refused = None
        with site.connect() as sock, sock.makefile("rb") as file:
            sock.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            refused = read_answer(file)
        assert refused.status in (200, 503)
        for sock in drips:
            sock.close()
        wait_until(lambda: site.ask("GET", "/v2").status == 200, "room for others")
    finally:
        for sock in drips:
            sock.close()


def test_idle_connections_give_way_to_a_new_connection(site: Site) -> None:
    idle = [site.connect() for _ in range(8)]
    try:
        for sock in idle:
            sock.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with sock.makefile("rb") as file:
                assert read_answer(file).status == 200
        wait_until(lambda: site.ask("GET", "/v2").status == 200, "an idle connection gives way")
    finally:
        for sock in idle:
            sock.close()


# --- figures ----------------------------------------------------------------------------------


def test_statistics_count_items_and_runs_and_nanoseconds(site: Site) -> None:
    def statistics() -> dict[str, Any]:
        return dict(site.ask("GET", "/v2/models/echo/stats").json["model_stats"][0])

    before = statistics()
    for _ in range(3):
        assert site.infer({"inputs": [json_input(ROWS)]}).status == 200
    assert site.infer({"inputs": [json_input(np.ones((2, 5), np.float32))]}).status == 400
    answered = before["inference_stats"]["success"]["count"] + 3  # an answer is counted after it was sent
    wait_until(lambda: statistics()["inference_stats"]["success"]["count"] >= answered, "every answer is counted")
    after = statistics()
    assert after["inference_count"] - before["inference_count"] == 6
    assert after["execution_count"] - before["execution_count"] == 3
    success = after["inference_stats"]["success"]
    assert success["count"] - before["inference_stats"]["success"]["count"] == 3
    parts = sum(
        after["inference_stats"][k]["ns"] for k in ("queue", "compute_input", "compute_infer", "compute_output")
    )
    assert 0 < parts <= success["ns"]
    assert {b["batch_size"] for b in after["batch_stats"]} >= {2}
    names = {m["name"] for m in site.ask("GET", "/v2/models/stats").json["model_stats"]}
    assert names == {"echo", "slow", "types"}


def test_metrics_are_read_by_prometheus_own_parser(site: Site) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
    assert site.infer({"inputs": [json_input(ROWS)]}).status == 200
    # Use new values: the answer to another test's values may be in the cache, and would not be too late.
    late = {"inputs": [json_input(ROWS + np.float32(518))], "parameters": {"timeout": 20_000}}
    with halted(site.device, "slow"):
        assert site.infer(late, "slow").status == 504
    answer = site.ask("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in parser.text_string_to_metric_families(answer.body.decode())}
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert families["edgert_requests"].type == "counter"
    assert families["edgert_request_duration_seconds"].type == "histogram"
    answered = samples[("edgert_requests_total", ("model", "echo"), ("outcome", "ok"))]
    assert answered >= 1
    assert samples[("edgert_request_duration_seconds_count", ("model", "echo"))] == answered
    buckets = [s for s in families["edgert_request_duration_seconds"].samples if s.name.endswith("_bucket")]
    echo = [s.value for s in buckets if s.labels["model"] == "echo"]
    assert echo == sorted(echo)
    assert echo[-1] == answered
    assert samples[("edgert_model_state", ("model", "echo"), ("state", "ready"))] == 1
    assert samples[
        ("edgert_model_info", ("engine", "null"), ("model", "types"), ("precision", "fp32"), ("release", "3"))
    ]
    assert samples[("edgert_http_responses_total", ("code", "504"))] >= 1
    assert samples[("edgert_batches_total", ("model", "echo"), ("reason", "idle"))] >= 1
    assert samples[("edgert_stage_seconds_total", ("model", "echo"), ("stage", "engine"))] > 0
    assert samples[("edgert_up",)] == 1


# --- Triton's own client ----------------------------------------------------------------------


def test_the_unmodified_tritonclient_works(site: Site) -> None:
    triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    triton_utils = pytest.importorskip("tritonclient.utils")
    client = triton.InferenceServerClient(f"127.0.0.1:{site.port}", concurrency=4)
    try:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("echo", "1")
        assert not client.is_model_ready("nobody")
        assert client.get_server_metadata()["name"] == "edgert"
        assert client.get_model_metadata("echo")["versions"] == ["1"]
        assert client.get_model_config("echo")["max_batch_size"] == 1024
        assert {m["name"] for m in client.get_model_repository_index()} == {"echo", "slow", "types"}
        for binary in (True, False):
            given = triton.InferInput("x", [2, 4], "FP32").set_data_from_numpy(ROWS, binary_data=binary)
            result = client.infer("echo", [given], request_id="a", priority=1, timeout=5_000_000)
            assert np.array_equal(result.as_numpy("y"), ROWS)
            assert result.get_response()["id"] == "a"
            wanted = triton.InferRequestedOutput("y", binary_data=binary)
            for packed in (None, "gzip", "deflate"):
                result = client.infer("echo", [given], outputs=[wanted], request_compression_algorithm=packed)
                assert np.array_equal(result.as_numpy("y"), ROWS)
            classes = triton.InferRequestedOutput("y", binary_data=binary, class_count=1)
            assert client.infer("echo", [given], outputs=[classes]).as_numpy("y").shape == (2, 1)
        assert client.get_inference_statistics("echo")["model_stats"][0]["inference_count"] > 0
        assert client.get_inference_statistics()["model_stats"]
        waiting = [client.async_infer("echo", [given]) for _ in range(8)]
        assert all(np.array_equal(w.get_result().as_numpy("y"), ROWS) for w in waiting)
        with pytest.raises(triton_utils.InferenceServerException, match="nobody") as caught:
            client.infer("nobody", [given])
        assert caught.value.status() == "404"
    finally:
        client.close()


def test_tritonclient_reads_every_datatype_and_chosen_outputs(site: Site) -> None:
    triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    arrays = {name: np.array([[0, 1], [1, 0], [1, 1]]).astype(dtype) for name, dtype in TYPES.items()}
    client = triton.InferenceServerClient(f"localhost:{site.port}")
    try:
        for binary in (True, False):
            inputs = [
                triton.InferInput(f"in_{name}", list(a.shape), name).set_data_from_numpy(a, binary_data=binary)
                for name, a in arrays.items()
            ]
            result = client.infer("types", inputs)
            for name, array in arrays.items():
                assert np.array_equal(result.as_numpy(f"out_{name}"), array)
                assert result.as_numpy(f"out_{name}").dtype == array.dtype
            mixed = [
                triton.InferRequestedOutput("out_FP16", binary_data=True),
                triton.InferRequestedOutput("out_INT64", binary_data=False),
                triton.InferRequestedOutput("out_BOOL", binary_data=True),
            ]
            result = client.infer("types", inputs, outputs=mixed)
            assert [o["name"] for o in result.get_response()["outputs"]] == ["out_FP16", "out_INT64", "out_BOOL"]
            for name in ("FP16", "INT64", "BOOL"):
                assert np.array_equal(result.as_numpy(f"out_{name}"), arrays[name])
    finally:
        client.close()


# --- the process ------------------------------------------------------------------------------


def test_only_its_group_can_use_a_unix_socket_and_the_server_opens_it_again_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with a_device(f'[http]\nlisten = "unix:{path}"\n') as device:
        device.put()

        def answers() -> bool:
            try:
                with socket.socket(socket.AF_UNIX) as sock, sock.makefile("rwb", 0) as file:
                    sock.settimeout(WAIT_S_MAX)
                    sock.connect(os.fspath(path))
                    file.write(b"GET /v2/models/echo HTTP/1.1\r\nHost: anything.example\r\n\r\n")
                    return read_answer(file).status == 200
            except OSError:
                return False

        wait_until(answers, "an answer over the Unix socket")
        assert path.stat().st_mode & 0o777 == 0o660
        pid = http_pid(device)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: http_pid(device) not in (None, pid) and answers(), "the server is started again")
        device.stop()
        assert not path.exists()


def test_the_http_server_of_a_killed_daemon_ends() -> None:
    with a_device('[http]\nlisten = "127.0.0.1:0"\n') as device:
        http_port(device)
        pid = http_pid(device)
        assert pid is not None
        os.kill(ask(device.state.control_socket, {"op": "status"}, WAIT_S_MAX)["pid"], signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the HTTP server ends with its daemon")


def test_a_refused_address_ends_the_server_and_not_the_daemon() -> None:
    with a_device('[http]\nlisten = "0.0.0.0:8000"\n') as device:
        device.put()
        wait_until(lambda: "can be reached from other machines" in device.log(), "the refusal is said")
        assert device.client().infer("echo", ROWS)["y"].shape == (2, 4)


def test_the_names_of_this_machine_are_recognized() -> None:
    assert all(is_local_name(h) for h in ("", "localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000", "[::1]"))
    assert not any(is_local_name(h) for h in ("evil.example", "localhost.evil.example:80", "127.0.0.1.nip.io:8000"))


def test_long_json_is_refused_in_requests_and_allowed_in_answers(site: Site) -> None:
    answer = site.ask("POST", "/v2/models/echo/infer", b'{"inputs": [' + b" " * 200_000 + b"]}")
    assert answer.status == 400
    rows = np.random.default_rng(1).random((1024, 4), np.float32)
    answer = site.infer({"inputs": [json_input(rows)]})
    assert answer.json["outputs"][0]["data"] == rows.ravel().tolist()

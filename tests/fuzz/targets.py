"""The readers of foreign bytes. Each is a function that accepts the bytes, or refuses them with a documented error.

Any other error, an answer that breaks its own format, a crash, a hang or much memory is a finding. `seeds` returns
valid inputs. A fuzzer starts with these inputs and the files in `corpus/`.
"""

from __future__ import annotations

import atexit
import functools
import io
import json
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.channel import STATEMENT_BYTES_MAX, Entry, Statement
from edgert.bundle.delta import Part, open_delivery, write_delta
from edgert.bundle.envelope import parse_envelope
from edgert.bundle.manifest import Manifest
from edgert.bundle.signing import PublicKey, SigningKey
from edgert.checks.status import DaemonStatus
from edgert.errors import (
    BundleCorrupt,
    BundleError,
    ChannelInvalid,
    EdgeRTError,
    ErrorText,
    ProtocolError,
    RegistryCorrupt,
    RequestError,
    SourceInvalid,
)
from edgert.http.admission import Admission, Place
from edgert.http.connection import HttpConnection
from edgert.http.limits import Limits
from edgert.http.messages import HttpError, HttpRequest, HttpResponse
from edgert.http.oip import LENGTH_HEADER, answer, read_request
from edgert.protocol import control
from edgert.protocol.frame_buffer import FrameBuffer
from edgert.registry.artifacts import channel_manifest, statement_blob
from edgert.typed_json import Mistyped, from_json, to_json
from edgert.versions.trial_limits import TrialLimits
from edgert_deploy.cli.shared.rollout_output import rollout_json, rollout_table
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.remote_daemon import RemoteDaemon
from edgert_deploy.devices.transports import PLAIN, LineSink, PutOptions, Result
from edgert_deploy.fleet.export.exporter import Exporter
from edgert_deploy.fleet.export.otlp import request as otlp_request
from edgert_deploy.fleet.export.prometheus import Exposition
from edgert_deploy.fleet.listener import FleetListener
from edgert_deploy.fleet.live_percentiles import LivePercentiles
from edgert_deploy.fleet.store.recorder import Recorder
from edgert_deploy.fleet.store.store import Store
from edgert_deploy.fleet.ui.fleet_state import Filter, FleetState
from edgert_deploy.packager.processes.sandbox import Limits as ChildLimits
from edgert_deploy.packager.sources.probe import MEMORY_BYTES_MIN
from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.rollout import deployment
from edgert_deploy.rollout.deployment import Outcome
from edgert_deploy.rollout.drift import device_drifts, model_drifts, wanted_by_rollouts
from edgert_deploy.rollout.rollout_record import Rollout, RolloutState, new_record
from edgert_deploy.rollout.rollout_store import RolloutStore
from edgert_deploy.rollout.waves import Strategy
from tests.support import models
from tests.support.bundles import make_null_bundle
from tests.support.fleet import NOW_MS, Pi
from tests.support.protocol_vectors import VECTORS
from tests.support.stand_ins.forked import Forked
from tests.support.statuses import LOADED, device_status, worker_figures

FRAME_BYTES_MAX = 1024**2
BODY_BYTES_MAX = 1024**2
MODEL_LIMITS = ChildLimits(MEMORY_BYTES_MIN, 30)


@dataclass(frozen=True)
class Target:
    """One reader. `length_max` is the largest length of the fuzzer's inputs."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    length_max: int = 4096


@functools.cache
def _folder() -> Path:
    """Return a folder for this process, in memory if possible: a fuzzer writes a thousand times a second."""
    folder = Path(tempfile.mkdtemp(prefix="edgert-fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# --- the local socket -------------------------------------------------------------------------


def wire(data: bytes) -> None:
    """Read frames of a client or a daemon in pieces, like from a socket; the last byte sets the pieces' size."""
    piece = 1 + (data[-1] if data else 0) * 8
    frames = FrameBuffer(FRAME_BYTES_MAX)
    with suppress(ProtocolError):
        while data:
            count = min(piece, len(data), len(frames.room))
            frames.room[:count] = data[:count]
            data = data[count:]
            frame = frames.feed(count)
            while frame is not None:
                with suppress(ProtocolError):
                    frame.json()
                assert sum(len(tensor.data) for tensor in frame.tensors) <= FRAME_BYTES_MAX
                frame = frames.feed(0) if frames.more else None


def _frames() -> list[bytes]:
    return [bytes.fromhex(each["hex"]) for kind in ("frames", "refused") for each in VECTORS[kind]]


def control_answer(data: bytes) -> None:
    """Read the daemon's answer to a command, and its status."""
    with suppress(EdgeRTError, Mistyped):
        from_json(DaemonStatus, control.read_answer(data))


def _control_answers() -> list[bytes]:
    serving = {**to_json(LOADED), **to_json(worker_figures(103, {"full": 3})), "state": "ready", "crashes": 0}
    status = {"pid": 7, "boot": "b1", "memory": {"used_mb": 1.5, "limit_mb": 0}, "models": {"echo": serving}}
    error = control.error_answer(BundleCorrupt("the bundle was changed"))
    return [json.dumps(value).encode() for value in (control.answer_of(status), error)]


# --- bundles ----------------------------------------------------------------------------------

KEY = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))


class _AnySignature(PublicKey):
    """A trusted key that accepts every signature, so that changed bytes reach the code behind this check."""

    def verifies(self, signature: bytes, data: bytes) -> bool:
        return True


TRUSTED = (_AnySignature(KEY.public.key),)


def envelope(data: bytes) -> None:
    """Read a signed envelope. An accepted envelope has the canonical form."""
    with suppress(BundleError):
        parse_envelope(data).verify(TRUSTED)


def manifest(data: bytes) -> None:
    """Read a signed manifest. An accepted manifest stays equal when it is written and read again."""
    with suppress(BundleError):
        read = Manifest.from_bytes(data)
        assert Manifest.from_bytes(read.to_bytes()) == read


def channel(data: bytes) -> None:
    """Read a channel's statement. An accepted statement stays equal when it is written and read again."""
    with suppress(ChannelInvalid):
        read = Statement.from_bytes(data)
        assert Statement.from_bytes(read.to_bytes()) == read


def registry(data: bytes) -> None:
    """Read a channel's manifest from a registry. The size of the statement that it names is within the limit."""
    with suppress(RegistryCorrupt):
        assert 0 <= statement_blob(data).size_bytes <= STATEMENT_BYTES_MAX


def delivery(data: bytes) -> None:
    """Read a bundle or a delta like `edgertd install`."""
    descriptor = os.memfd_create("delivery")
    try:
        os.write(descriptor, data)
        path = Path(f"/proc/self/fd/{descriptor}")
        with suppress(BundleError), open_delivery(path, TRUSTED, lambda _: _held()) as opened:
            opened.verify_files()
    finally:
        os.close(descriptor)


PROGRAM = b'{"op": "copy", "delay_s": 0.0}'  # of the bundle's model


@functools.cache
def _bundle() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return make_null_bundle(Path(folder), KEY, receipt={"format": 2}).read_bytes()


@functools.cache
def _held() -> dict[str, Path]:
    """Return the files on the device by their digests: the files of the bundle."""
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "bundle").write_bytes(_bundle())
        with open_bundle(path, None) as opened:
            names = {file.path: file.sha256 for file in opened.manifest.files}
            for name, digest in names.items():
                (_folder() / digest).write_bytes(opened.read_file(name, BODY_BYTES_MAX))
    return {digest: _folder() / digest for digest in names.values()}


def _opened() -> tuple[Manifest, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "bundle").write_bytes(_bundle())
        with open_bundle(path, None) as opened:
            return opened.manifest, opened.envelope.raw


def _manifests() -> list[bytes]:
    return [_opened()[0].to_bytes()]


def _envelopes() -> list[bytes]:
    return [_opened()[1]]


def _statements() -> list[bytes]:
    entry = Entry("echo", 2, "0" * 64, "1" * 64, "2" * 64, 0.5, ("lab",), limits={"p99_ms": 8.0})
    times = ("2026-11-22T08:00:00Z", "2026-12-22T08:00:00Z")
    return [Statement("stable", 7, *times, (entry,), revoked=("0" * 16,)).to_bytes()]


def _channel_manifests() -> list[bytes]:
    return [channel_manifest(statement, "stable", 7, "2027-02-19T08:00:00Z") for statement in _statements()]


def _deliveries() -> list[bytes]:
    import zstandard

    described, signed = _opened()
    (digest,) = (file.sha256 for file in described.files if file.path == "null/model.json")
    deltas = []
    for how in ("raw", "zstd", "patch"):
        with tempfile.TemporaryDirectory() as folder:
            known = zstandard.ZstdCompressionDict(PROGRAM, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
            packer = zstandard.ZstdCompressor(dict_data=known if how == "patch" else None)
            (content := Path(folder) / "content").write_bytes(PROGRAM if how == "raw" else packer.compress(PROGRAM))
            part = Part(digest, how, content.stat().st_size, digest if how == "patch" else "")
            out = io.BytesIO()
            write_delta(out, signed, [(part, content)])
            deltas.append(out.getvalue())
    return [_bundle(), *deltas]


# --- HTTP -------------------------------------------------------------------------------------


def http(data: bytes) -> None:
    """Send only `data`, like a client. Every answer is HTTP, and its body is strict JSON."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * BODY_BYTES_MAX)
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        limits = Limits(BODY_BYTES_MAX, connections_max=1)
        with suppress(OSError):
            HttpConnection(ours, _respond, limits, Admission(limits), Place(ours, "", 0.0)).serve()
        with suppress(OSError):
            ours.shutdown(socket.SHUT_WR)
        said = bytearray()
        while part := theirs.recv(1 << 16):
            said += part
    assert not said or said.startswith(b"HTTP/1.1 ")
    assert b"HTTP/1.1 5" not in said, said[:300]


def _respond(request: HttpRequest) -> HttpResponse:
    """Answer like the endpoint of an inference, from a model that returns its inputs."""
    try:
        question = read_request(request.body, request.headers.get(LENGTH_HEADER.lower()))
        outputs = {name: np.zeros(len(v)) if isinstance(v, list) else v for name, v in question.inputs.items()}
        for want in question.outputs or ():
            if want.name not in outputs:
                raise RequestError(f"there is no output {want.name!r}")
        response = answer(question, "model", 1, outputs, ("cat", "dog"))
    except EdgeRTError as error:
        return HttpError.of(error).response()
    if response.content_type == "application/json":
        json.loads(b"".join(response.parts), parse_constant=_no_json)
    return response


def _no_json(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def _requests() -> list[bytes]:
    flat = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1.0, 2.5, -3, 4]}
    nested = {"name": "n", "datatype": "UINT64", "shape": [1, 2], "data": [[1, 2**64 - 1]]}
    question = {"id": "7", "inputs": [flat, nested], "parameters": {"timeout": 1000, "priority": 1}}
    wanted = {**question, "outputs": [{"name": "x", "parameters": {"classification": 2}}]}
    head = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "INT16", "shape": [1, 2], "parameters": {"binary_data_size": 4}},
                {"name": "f", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 7}},
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    binary = head + bytes(4) + struct.pack("<I", 3) + b"abc"
    text = json.dumps(question).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (text[:9], text[9:])) + b"0\r\n\r\n"
    import gzip

    zipped = gzip.compress(text, mtime=0)
    return [
        _post(text),
        _post(json.dumps(wanted).encode()) + _post(text),
        _post(binary, f"{LENGTH_HEADER}: {len(head)}\r\n"),
        _post(zipped, "Content-Encoding: gzip\r\n"),
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks,
        b"GET /v2 HTTP/1.0\r\nConnection: keep-alive\r\nExpect: 100-continue\r\n\r\n",
    ]


def _post(body: bytes, fields: str = "") -> bytes:
    head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{fields}\r\n"
    return head.encode() + body


# --- the fleet --------------------------------------------------------------------------------


def mqtt(data: bytes) -> None:
    """Read a hostile device's messages, each a line with topic and payload. All views still show the fleet."""
    state, fleet_state = LivePercentiles(wall_ms=lambda: NOW_MS), FleetState(lambda: NOW_MS)
    exporter = Exporter("x", by=("device", "model"), wall_clock=lambda: NOW_MS / 1000)
    for listener in (state, fleet_state, exporter):
        _apply(listener, data)
    json.dumps([row.as_json() for row in state.rows(1001.0)], allow_nan=False).encode()
    fleet_state.views(Filter(), 1001.0)
    fleet_state.filter_values()
    exposition = Exposition(exporter)
    exposition.text().encode()
    exposition.protobuf()
    otlp_request(exporter, NOW_MS / 1000).SerializeToString()


def store(data: bytes) -> None:
    """Read the same messages. A store accepts all messages that a recorder accepts."""
    recorder = Recorder(_store(), lambda: NOW_MS)
    _apply(recorder, data)
    recorder.flush()


def _apply(listener: FleetListener, data: bytes) -> None:
    for line in data.split(b"\n")[:8]:
        topic, _, payload = line.partition(b" ")
        listener.apply(topic.decode(errors="surrogateescape"), payload, False, 1000.0)


@functools.cache
def _store() -> Store:
    return Store(f"sqlite:///{_folder() / 'fleet.db'}")


def _reports() -> list[bytes]:
    pi = Pi("pi-1")
    event = {
        "v": 1,
        "ts": NOW_MS,
        "boot": "b1",
        "seq": 4,
        "event": "alarm_raised",
        "model": "digits",
        "alarm": "p95_ms",
    }
    deploy = {"v": 1, "ts": NOW_MS, "boot": "b1", "digits_state": "live_good", "digits_release": 3}
    sent = [
        *pi.info(),
        *pi.window(NOW_MS, [1.0, 2.5, 300.0], errors=1, queue=[0.0, 0.25, 1.0], engine=[0.5, 2.0, 290.0]),
        (pi.topics.event, json.dumps(event).encode()),
        (pi.topics.deploy, json.dumps(deploy).encode()),
        (pi.topics.sys, json.dumps({"v": 1, "ts": NOW_MS, "boot": "b1", "temp_c": 61.5}).encode()),
    ]
    lines = [topic.encode() + b" " + payload for topic, payload in sent]
    return [*lines, b"\n".join(lines)]


# --- a device's answers -----------------------------------------------------------------------


class _Answering:
    """A transport whose every command prints `said`."""

    def __init__(self, said: bytes) -> None:
        self._said = said.decode(errors="replace")

    def run(
        self, argv: Sequence[str], timeout_s: float, input: bytes = b"", on_stderr: LineSink | None = None
    ) -> Result:
        return Result(tuple(argv), 0 if len(self._said) % 2 else 1, self._said, self._said[:100])

    def put(self, local: Path, remote: str, how: PutOptions = PLAIN) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


def device_answer(data: bytes) -> None:
    """Read the status that a device prints: the result is an error, or the host can show drift and JSON."""
    with suppress(EdgeRTError):
        found = RemoteDaemon(_Answering(data), Device("pi", "ssh", "pi@pi", "rpi4", "/var/lib/edgert")).status()
        model_drifts(found, {})
        device_drifts(found)
        json.dumps(found.as_json(), allow_nan=False)


def _device_answers() -> list[bytes]:
    from edgert.checks.status import ModelStatus, ServingStatus
    from edgert.versions.slots import Version

    version = Version(3, "d" * 64, True)
    serving = ServingStatus("ready", loaded=LOADED, figures=worker_figures(103, {"full": 3}))
    status = device_status(ModelStatus("echo", "live_good", version, None, 3, serving=serving), claims=())
    good = json.dumps(status.as_json()).encode()
    refused = b'{"error": {"code": "bundle.corrupt", "exit_code": 5, "message": "changed"}}'
    # `_Answering` takes the exit code from the length.
    return [text + b" " * (len(text) % 2 != odd) for text, odd in ((good, 1), (refused, 0))]


# --- rollouts of other hosts of a team ----------------------------------------------------


def rollout(data: bytes) -> None:
    """Read a record of a rollout from git or the team's store. It is refused, or it can be shown and continued."""
    rollouts = RolloutStore(_folder() / "rollouts")
    path = rollouts.path("digits-r7-1")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    for found in rollouts.all():
        rollout_table(found)
        rollout_table(found, every=False)
        json.dumps(rollout_json(found))
        wanted_by_rollouts([found], found.inventory)
        found.strategy.split(len(found.devices))
        rollouts.write(replace(found, state=RolloutState.ABORTED))
        assert rollouts.read(found.id).state == RolloutState.ABORTED


def _rollouts() -> list[bytes]:
    failed = Outcome("a", deployment.Result.FAILED, error=ErrorText("transport.unreachable", "no answer"))
    strategy, limits = Strategy.parse(1, "50%,100%", "5%", 8, 60.0), TrialLimits({"p99_ms": 8.0}, 60.0, False, 60.0)
    begun = Rollout(
        id="digits-r7-1",
        bundle="b",
        digest="d",
        model="digits",
        release=7,
        inventory="inventory.toml",
        devices=("a", "b"),
        strategy=strategy,
        trial_s=60.0,
        limits=limits,
        number=1,
    )
    record, lines = new_record(begun)
    ended = replace(begun, outcomes={"a": failed}, devices=("a",), state=RolloutState.ABORTED, by="ann@a")
    lines += record.changed_to(ended)[1]
    return ["".join(f"{line}\n" for line in lines).encode()]


# --- model files ------------------------------------------------------------------------------


def _probed(examiner: str, *modules: str) -> Callable[[bytes], None]:
    """Return a target that examines a model in a fork with libraries loaded, under a probe's limits."""

    @functools.cache
    def forked() -> Forked:
        return Forked(*modules)

    def run(data: bytes) -> None:
        try:
            said, _ = forked().ask(examiner, {"name": "model"}, data, MODEL_LIMITS)
        except SourceInvalid as error:
            refusal = error.message
        else:
            refusal = "" if said["inputs"] and said["outputs"] else "Traceback"
        assert len(refusal) < 2000
        assert "\n" not in refusal
        assert "Traceback" not in refusal

    return run


onnx = _probed("edgert_deploy.packager.sources.onnx_model:examine", "onnx", "onnxruntime")
tflite = _probed("edgert_deploy.packager.sources.tflite_model:examine", "ai_edge_litert.interpreter")


def _onnx_files() -> list[bytes]:
    return [make().SerializeToString() for make in (models.mlp, models.two_by_two)]


def _tflite_files() -> list[bytes]:
    return [lower(models.mlp())]


TARGETS = {
    "wire": Target(wire, _frames),
    "control": Target(control_answer, _control_answers, 8192),
    "envelope": Target(envelope, _envelopes, 8192),
    "manifest": Target(manifest, _manifests, 8192),
    "channel": Target(channel, _statements, 8192),
    "registry": Target(registry, _channel_manifests, 4096),
    "delivery": Target(delivery, _deliveries, 1 << 15),
    "http": Target(http, _requests),
    "mqtt": Target(mqtt, _reports),
    "store": Target(store, _reports),
    "device": Target(device_answer, _device_answers, 8192),
    "rollout": Target(rollout, _rollouts),
    "onnx": Target(onnx, _onnx_files, 1 << 14),
    "tflite": Target(tflite, _tflite_files, 1 << 14),
}

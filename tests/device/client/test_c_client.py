"""edgert.h, the C client: without a warning, under sanitizers, and against the real daemon."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgert
from edgert.errors import ProtocolError, Unavailable
from edgert.protocol import wire
from edgert.protocol.sharing import SharedArea
from edgert.tensors import NUMPY_NAMES
from tests.support.clients import halted
from tests.support.devices import WAIT_S_MAX, Device, a_device, wait_until
from tests.support.frames import complete
from tests.support.paths import ROOT
from tests.support.protocol_vectors import KINDS, VECTORS
from tests.support.stand_ins.false_daemon import RESULT, WELCOME, WELCOME_FRAME, changed, false_daemon

SOURCES = Path(__file__).parent / "c"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]
SANITIZERS = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


# --- building -------------------------------------------------------------------------------


def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert found, "no C compiler is installed: apt-get install gcc libc6-dev"
    return found


def compiled(source: Path, program: Path, *options: str, cc: str | None = None) -> Path:
    command = [cc or compiler(), *options, f"-I{edgert.include_dir()}", os.fspath(source), "-o", os.fspath(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return program


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Builds a source file once, with sanitizers if this machine's compiler supports them."""
    folder = tmp_path_factory.mktemp("c")
    empty = folder / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    probe = [compiler(), *SANITIZERS, os.fspath(empty), "-o", os.fspath(folder / "empty")]
    sanitized = (
        subprocess.run(probe, capture_output=True, timeout=120).returncode == 0
        and subprocess.run([folder / "empty"], capture_output=True, timeout=60).returncode == 0
    )
    programs: dict[Path, Path] = {}

    def build(source: Path) -> Path:
        if source not in programs:
            options = ["-std=c99", *WARNINGS, *(SANITIZERS if sanitized else ["-O1"]), "-pthread"]
            programs[source] = compiled(source, folder / source.stem, *options)
        return programs[source]

    return build


def compilers() -> list[str]:
    """Return the compilers of this machine, one of each kind: cc is usually a link to another compiler."""
    found = {os.path.realpath(path): path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))}
    return list(found.values())


@pytest.mark.parametrize("cc", compilers() or [""], ids=os.path.basename)
@pytest.mark.parametrize("standard", ["c99", "gnu17"])
def test_the_header_compiles_without_a_warning(cc: str, standard: str, tmp_path: Path) -> None:
    compiler()  # fails if there is none
    options = [f"-std={standard}", "-O2", *WARNINGS, "-Wconversion", "-Wcast-qual", "-Wstrict-prototypes"]
    source = tmp_path / "only.c"
    source.write_text('#define EDGERT_IMPLEMENTATION\n#include "edgert.h"\n')
    compiled(source, tmp_path / "only.o", *options, "-c", cc=cc)


def test_the_header_compiles_in_cpp_and_in_several_files_of_a_program(tmp_path: Path) -> None:
    cxx = shutil.which("c++")
    source = tmp_path / "one.cc" if cxx else tmp_path / "one.c"
    source.write_text(
        '#include "edgert.h"\n#include "edgert.h"\nint main() { return edgert_datatype_bytes(EDGERT_FP32) != 4; }\n'
    )
    other = tmp_path / f"two{source.suffix}"
    other.write_text('#define EDGERT_IMPLEMENTATION\n#include "edgert.h"\n#include "edgert.h"\n')
    options = ["-std=c++11" if cxx else "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    program = compiled(source, tmp_path / "two-files", *options, os.fspath(other), cc=cxx or compiler())
    assert subprocess.run([program], timeout=WAIT_S_MAX).returncode == 0


# --- the codec ------------------------------------------------------------------------------


class Lines:
    """A program that answers each line on its stdin with a line of JSON."""

    def __init__(self, *command: object) -> None:
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        timer = threading.Timer(WAIT_S_MAX, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            _, errors = self.process.communicate(timeout=WAIT_S_MAX)
            raise AssertionError(f"the program ended with {self.process.returncode}: {errors}")
        return dict(json.loads(line))

    def end(self) -> None:
        """Wait for the program, which ends at the end of its input, without a report of a sanitizer."""
        _, errors = self.process.communicate(timeout=WAIT_S_MAX)
        assert self.process.returncode == 0, f"exit {self.process.returncode}: {errors}"


@contextlib.contextmanager
def running(*command: object) -> Iterator[Lines]:
    lines = Lines(*command)
    try:
        yield lines
        lines.end()
    finally:
        lines.process.kill()
        lines.process.wait(WAIT_S_MAX)


@pytest.fixture(scope="module")
def codec(built: Callable[[Path], Path]) -> Iterator[Lines]:
    with running(built(SOURCES / "vectors.c")) as lines:
        yield lines


def decoded_in_c(codec: Lines, data: bytes) -> dict[str, Any]:
    """Decode like `decoded`, in C. The keys `refused` or `incomplete` mark bytes that are no frame."""
    read = codec.ask(f"decode {data.hex()}")
    if "kind" not in read:
        return read
    read["kind"] = next(name for name, kind in KINDS.items() if kind == read["kind"])
    read["meta"] = bytes.fromhex(read["meta"]).decode() or None
    for tensor in read["tensors"]:
        values = np.frombuffer(bytes.fromhex(tensor.pop("data")), NUMPY_NAMES[tensor["datatype"]])
        tensor["values"] = values.tolist()
    return read


def vectors(*kinds: str) -> Any:
    return [pytest.param(v, id=v["name"]) for v in VECTORS["frames"] if not kinds or v["kind"] in kinds]


@pytest.mark.parametrize("vector", vectors())
def test_c_reads_a_frame_as_its_vector_says(codec: Lines, vector: dict[str, Any]) -> None:
    read = decoded_in_c(codec, bytes.fromhex(vector["hex"]))
    error = read.pop("error", None)
    assert read == {key: vector[key] for key in read}
    assert len(read) == 9
    if vector["kind"] == "ERROR":
        meta = json.loads(vector["meta"])
        assert bytes.fromhex(error["message"]).decode() == meta["message"]
        assert (error["code"], bool(error["retryable"])) == (meta["code"], meta["retryable"])
        assert error["retry_after_ms"] == vector["arg"]


@pytest.mark.parametrize("vector", vectors("INFER"))
def test_c_writes_a_request_as_its_vector_says(codec: Lines, vector: dict[str, Any]) -> None:
    assert codec.ask(words_of("infer", vector))["hex"] == vector["hex"]


def test_c_writes_a_request_into_shared_memory_as_its_vector_says(codec: Lines) -> None:
    (vector,) = [v for v in VECTORS["shared"] if v["kind"] == "INFER"]
    written = codec.ask(words_of("share", {**vector, "flags": 0}))
    assert written == {"hex": vector["hex"], "memory": vector["memory"]}


def words_of(command: str, vector: dict[str, Any]) -> str:
    tensors = []
    for tensor in vector["tensors"]:
        data = np.array(tensor["values"], NUMPY_NAMES[tensor["datatype"]]).tobytes().hex()
        dims = ",".join(map(str, tensor["shape"]))
        tensors.append(f"{wire.DATATYPE_CODES[tensor['datatype']]}:{len(tensor['shape'])}:{dims}:{data}")
    fields = [str(vector[key]) for key in ("flags", "request_id", "model_id", "arg")]
    return " ".join([command, *fields, *tensors])


def test_c_writes_a_hello_and_a_ping_as_their_vectors_say(codec: Lines) -> None:
    by_name = {vector["name"]: vector for vector in VECTORS["frames"]}
    for name in ("hello", "hello-escaped"):
        model = json.loads(by_name[name]["meta"])["model"]
        assert codec.ask(f"hello {model}")["hex"] == by_name[name]["hex"]
    assert codec.ask("hello-session vad")["hex"] == by_name["hello-session"]["hex"]
    assert codec.ask("hello-shared digits")["hex"] == by_name["hello-shared"]["hex"]
    assert codec.ask("ping 10")["hex"] == by_name["ping"]["hex"]


@pytest.mark.parametrize("vector", [pytest.param(v, id=v["name"]) for v in VECTORS["refused"]])
def test_c_refuses_a_frame_that_breaks_a_rule(codec: Lines, vector: dict[str, Any]) -> None:
    assert "refused" in decoded_in_c(codec, bytes.fromhex(vector["hex"]))


def test_c_and_python_accept_the_same_frames(codec: Lines) -> None:
    """The test changes a few bytes or one field of the vectors at random, with a fixed seed."""
    chance = random.Random(3)
    frames = [bytes.fromhex(v["hex"]) for v in VECTORS["frames"]]
    fields = [4, 5, 24, 28, 32, 33, *range(64, 104)]
    refused = 0
    for _ in range(3000):
        data = bytearray(chance.choice(frames))
        for _ in range(chance.choice((1, 1, 2, 5))):
            at = chance.choice(fields) if chance.random() < 0.8 else chance.randrange(len(data))
            data[at % len(data)] = chance.choice((0, 1, 2, 9, 64, 128, 255, chance.randrange(256)))
        if data[6] & wire.FLAG_SHARED:
            continue
        try:
            read: dict[str, Any] | None = decoded_or_incomplete(bytes(data))
        except ProtocolError:
            read = None
        in_c = decoded_in_c_raw(codec, bytes(data))
        refused += read is None
        assert ("refused" in in_c, "incomplete" in in_c) == (read is None, read == {}), bytes(data).hex()
    assert 500 < refused < 2900


def decoded_or_incomplete(data: bytes) -> dict[str, Any]:
    frame = complete(data)
    return {} if frame is None else {"kind": frame.kind}


def decoded_in_c_raw(codec: Lines, data: bytes) -> dict[str, Any]:
    return codec.ask(f"decode {data.hex()}")


def text(value: str) -> str:
    return bytes.fromhex(value).decode()


def specs(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**value, "name": text(value["name"])} for value in values]


@pytest.mark.parametrize("vector", [p for p in vectors("WELCOME") if p.id != "welcome-list"])
@pytest.mark.parametrize("spaces", [False, True], ids=["dense", "spaced"])
def test_c_understands_a_welcome(codec: Lines, vector: dict[str, Any], spaces: bool) -> None:
    meta = json.loads(vector["meta"])
    spelled = json.dumps(meta, indent=1, ensure_ascii=False) if spaces else vector["meta"]
    read = codec.ask(f"welcome {spelled.encode().hex()}")
    assert (text(read["model"]), text(read["engine"])) == (meta["model"], meta["engine"])
    assert (read["release"], read["frame_bytes_max"]) == (meta["release"], meta["frame_bytes_max"])
    assert specs(read["inputs"]) == meta["inputs"]
    assert specs(read["outputs"]) == meta["outputs"]
    assert specs(read["preprocess"]) == ([meta["preprocess"]["input"]] if "preprocess" in meta else [])
    assert specs(read["files"]) == ([meta["preprocess"]["files"]] if "preprocess" in meta else [])
    assert [text(label) for label in read["labels"]] == meta.get("labels", [])


HOSTILE_WELCOMES = {
    "nothing": "",
    "a NUL": "\0",
    "a list": "[1]",
    "no tensors": '{"model": "echo"}',
    "after the end": WELCOME + "{}",
    "a trailing comma": WELCOME[:-1] + ",}",
    "a missing comma": WELCOME.replace(', "release"', ' "release"'),
    "an open string": WELCOME[: WELCOME.index("echo") + 2],
    "deep": WELCOME[:-1] + ', "z": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "deep objects": WELCOME[:-1] + ', "z": ' + '{"a":' * 50_000,
    "a NUL in a name": WELCOME.replace('"x"', '"x\\u0000y"'),
    "half an escape": WELCOME.replace('"x"', '"\\u12"'),
    "an escape at the end": WELCOME[: WELCOME.index("echo")] + "\\",
    "an unknown escape": WELCOME.replace('"x"', '"\\x41"'),
    "a raw control character": WELCOME.replace('"x"', '"x\ny"'),
    "nine axes": WELCOME.replace("[-1, 4]", "[1, 1, 1, 1, 1, 1, 1, 1, 1]", 1),
    "a length of -2": WELCOME.replace("[-1, 4]", "[-2, 4]", 1),
    "a length beyond 32 bits": WELCOME.replace("[-1, 4]", "[4294967296]", 1),
    "a length beyond 64 bits": WELCOME.replace("[-1, 4]", "[99999999999999999999999]", 1),
    "a fraction": WELCOME.replace('"release": 1', '"release": 1.5'),
    "an exponent": WELCOME.replace('"release": 1', '"release": 1e9'),
    "a datatype not known": WELCOME.replace("FP32", "FP8", 1),
    "a frame limit below zero": WELCOME.replace("65536", "-65536"),
    "33 inputs": WELCOME.replace(
        '"inputs": [', '"inputs": [' + '{"name": "a", "datatype": "BOOL", "shape": []}, ' * 32
    ),
    "labels that are numbers": WELCOME[:-1] + ', "labels": [1, 2]}',
    "labels without an end": WELCOME[:-1] + ', "labels": ["a", "b"',
    "labels twice, the second broken": WELCOME[:-1] + ', "labels": ["a"], "labels": ["b", 3]}',
    "a string for inputs": WELCOME.replace('"inputs": [', '"inputs": "x", "other": ['),
}


@pytest.mark.parametrize("name", HOSTILE_WELCOMES)
def test_c_refuses_a_hostile_welcome(codec: Lines, name: str) -> None:
    assert codec.ask(f"welcome {HOSTILE_WELCOMES[name].encode().hex()}") == {"refused": True}


def test_c_survives_random_changes_of_a_welcome(codec: Lines) -> None:
    chance = random.Random(4)
    metas = [v["meta"].encode() for v in VECTORS["frames"] if v["kind"] == "WELCOME"]
    alphabet = b'{}[]",:\\u0dD8-1eE. \x00\xff'
    accepted = 0
    for _ in range(3000):
        data = bytearray(chance.choice(metas))
        for _ in range(chance.choice((1, 1, 2, 4))):
            at = chance.randrange(len(data))
            kind = chance.randrange(4)
            if kind == 0:
                del data[at:]
                data += b"\\" * chance.randrange(2) or b'"'
            elif kind == 1:
                data[at : at + chance.randrange(8)] = bytes(chance.choices(alphabet, k=chance.randrange(6)))
                data += b" " * (not data)
            else:
                data[at] = chance.choice(alphabet)
        accepted += "refused" not in codec.ask(f"welcome {data.hex()}")
    assert accepted > 100


def test_c_replaces_half_a_surrogate_pair_and_cuts_a_message_that_is_too_long(codec: Lines) -> None:
    read = codec.ask(f"welcome {WELCOME.replace('echo', 'e' + chr(92) + 'ud83dz').encode().hex()}")
    assert text(read["model"]) == "e\ufffdz"
    message = "é" * 700
    frame = wire.json_frame(wire.ERROR, {"message": message}, status=10)
    cut = text(codec.ask(f"decode {frame.hex()}")["error"]["message"])
    assert message.startswith(cut)
    assert len(cut.encode()) in (510, 511)
    for meta in (b"", b"{", b'{"message": 5}', b"[]", b'{"message": "x', b'{"message": "\\ud800"}'):
        frame = b"".join(wire.frame(wire.ERROR, status=999, meta=meta))
        assert codec.ask(f"decode {frame.hex()}")["error"]["code"] == "internal"


# --- against the daemon ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver(built: Callable[[Path], Path]) -> Path:
    return built(SOURCES / "driver.c")


@pytest.fixture(scope="module")
def serving() -> Iterator[Device]:
    """A device for all tests that do not change it."""
    with a_device() as device:
        device.put()
        device.put(model="sum", op="sum")
        device.put(model="large", item_shape=(300_000,))
        yield device


@contextlib.contextmanager
def client(driver: Path, path: Path, model: str = "echo", timeout_ms: int = 20_000) -> Iterator[Lines]:
    with running(driver, path, model, timeout_ms) as lines:
        assert lines.answer() == {"connected": True}
        yield lines


def refusal(driver: Path, path: Path, model: str = "echo", timeout_ms: int = 20_000) -> dict[str, Any]:
    """Return the error of an attempt to connect."""
    command = [os.fspath(driver), os.fspath(path), model, str(timeout_ms)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    return dict(json.loads(done.stdout))


def test_c_gets_its_own_answer(serving: Device, driver: Path) -> None:
    with client(driver, serving.socket) as echo, client(driver, serving.socket, "sum") as sums:
        first = echo.ask("infer 0 0 2 1 4 1")
        again = echo.ask("infer 0 0 2 1 4 1")
        uncached = echo.ask("infer 0 1 2 3 4 7")
        assert sums.ask("infer 0 0 2 1 4 1")["outputs"]["y"]["values"] == [10.0] * 4
        assert echo.ask("ping") == {"alive": True}
    assert first["outputs"]["y"] == {"shape": [1, 4], "bytes": 16, "values": [1.0, 2.0, 3.0, 4.0]}
    assert (first["release"], first["batch"], first["cache_hit"]) == (1, 1, 0)
    assert again["outputs"] == first["outputs"]
    assert (again["batch"], again["cache_hit"], again["engine_us"]) == (0, 1, 0)
    assert uncached["outputs"]["y"]["values"] == [7.0 + i for i in range(12)]
    assert (uncached["cache_hit"], uncached["aligned"]) == (0, 1)


def test_c_gets_the_description_of_the_model(serving: Device, driver: Path) -> None:
    with serving.client() as python:
        frame_bytes_max = python.metadata("echo")["frame_bytes_max"]
    with client(driver, serving.socket) as echo:
        assert echo.ask("describe") == {
            "model": "echo", "release": 1, "engine": "null", "frame_bytes_max": frame_bytes_max,
            "input": "x", "datatype": "FP32", "shape": [-1, 4], "output": "y",
        }  # fmt: skip


def test_c_sends_and_receives_tensors_of_megabytes(serving: Device, driver: Path) -> None:
    with client(driver, serving.socket, "large") as large:
        for rows in (1, 4, 1):
            answer = large.ask(f"infer 0 1 2 {rows} 300000 5")
            assert answer["outputs"]["y"]["bytes"] == rows * 1_200_000
            assert answer["outputs"]["y"]["values"] == [5.0 + i for i in range(16)]
        assert large.ask("infer 0 1 2 60 300000 5")["code"] == "request.invalid"  # longer than a frame may be
        assert large.ask("infer 0 1 2 1 300000 6")["outputs"]["y"]["values"][0] == 6.0


def test_c_shares_memory_with_the_daemon_unless_compiled_without_shared_memory(
    serving: Device, driver: Path, tmp_path: Path
) -> None:
    def areas(lines: Lines) -> int:
        return Path(f"/proc/{lines.process.pid}/maps").read_text().count("/memfd:edgert")

    alone = compiled(SOURCES / "driver.c", tmp_path / "alone", "-O1", "-pthread", "-DEDGERT_NO_SHARED_MEMORY")
    for program, expected in ((driver, 1), (alone, 0)):
        with client(program, serving.socket, "large") as large:
            for rows in (
                1,
                60,
                2,
                13,
            ):  # some requests fit into the shared memory, some only into a frame, one into neither
                answer = large.ask(f"infer 0 1 2 {rows} 300000 {rows}")
                if rows == 60:
                    assert answer["code"] == "request.invalid"
                    continue
                assert answer["outputs"]["y"]["bytes"] == rows * 1_200_000
                assert answer["outputs"]["y"]["values"][:2] == [rows, rows + 1]
            assert areas(large) == expected


def test_inputs_of_c_that_do_not_fit_are_refused_and_the_connection_continues(serving: Device, driver: Path) -> None:
    with client(driver, serving.socket) as echo:
        for words in ("2 1 5", "1 4", "2 0 4", "2 5000 4"):
            answer = echo.ask(f"infer 0 0 {words} 0")
            assert (answer["code"], answer["retryable"], answer["number"]) == ("request.invalid", 0, 10)
        assert echo.ask("infer 0 0 2 1 4 1")["outputs"]["y"]["values"] == [1.0, 2.0, 3.0, 4.0]


def test_c_refuses_wrong_calls_of_a_program(serving: Device, built: Callable[[Path], Path]) -> None:
    """An earlier version sent a shape whose size overflows, and repeated this request until the time-out."""
    program = built(Path(__file__).parent / "c" / "misuse.c")
    done = subprocess.run([program, serving.socket, "echo"], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_c_gets_the_error_of_an_unknown_model_and_of_a_missing_daemon(
    serving: Device, driver: Path, tmp_path: Path
) -> None:
    unknown = refusal(driver, serving.socket, "nothing")
    assert unknown["code"] == "request.model_not_found"
    assert "echo" in unknown["message"]
    absent = refusal(driver, tmp_path / "none.sock")
    assert (absent["code"], absent["retryable"]) == ("unavailable.daemon", 1)
    assert "edgertd start" in absent["message"]
    assert refusal(driver, Path("/" + "x" * 200))["code"] == "request.invalid"
    assert refusal(driver, serving.socket, "m" * 5000)["code"] == "request.invalid"


def test_a_request_of_c_ends_at_its_time_out(serving: Device, driver: Path) -> None:
    serving.put(model="late")
    with client(driver, serving.socket, "late") as late:
        with halted(serving, "late"):
            assert late.ask("infer 100 1 2 1 4 1")["code"] == "request.deadline_exceeded"
        assert late.ask("infer 0 1 2 1 4 9")["outputs"]["y"]["values"] == [9.0, 10.0, 11.0, 12.0]


def test_c_gets_the_error_of_an_overload_and_when_to_come_back(driver: Path) -> None:
    with a_device("[serving]\nqueue_max = 1\nbatch_max = 1\nconnections_max = 12\n") as device:
        device.put(delay_s=0.05)
        with running(driver, device.socket, "echo", 500, 20) as load:

            def noticed() -> bool:
                count = load.ask("count")
                return bool(count["errors"] > 40 and count["answers"] > 0)

            wait_until(noticed, "the overload is noticed, and some are answered")
            found = load.ask("stop")
        assert found["answers"] > 0
        codes = {error["code"] for error in found["errors"]}
        assert "unavailable.overloaded" in codes
        assert codes <= {"unavailable.overloaded", "request.deadline_exceeded"}
        assert all(e["retry_after_ms"] > 0 for e in found["errors"] if e["code"] == "unavailable.overloaded")


def test_no_request_of_c_is_lost_in_hot_swaps_under_load(serving: Device, driver: Path) -> None:
    serving.put(model="swapped")
    with running(driver, serving.socket, "swapped", 20_000, 6) as load:
        for release in range(1, 6):
            if release > 1:
                serving.put(model="swapped", release=release)
            # Requests of the old release may still be answered once a command has ended.
            wait_until(lambda release=release: load.ask("count")["releases"] == release, "the release answers")  # type: ignore[misc]
            seen = load.ask("count")["answers"]
            wait_until(lambda seen=seen: load.ask("count")["answers"] > seen + 50, "the load goes on")  # type: ignore[misc]
        found = load.ask("stop")
    assert found["errors"] == []
    assert set(found["releases"]) == {"1", "2", "3", "4", "5"}


def test_c_gets_the_error_of_a_lost_worker_and_the_next_request_is_answered(serving: Device, driver: Path) -> None:
    serving.put(model="lost", delay_s=0.05)
    with client(driver, serving.socket, "lost") as idle, running(driver, serving.socket, "lost", 20_000, 3) as load:
        wait_until(lambda: load.ask("count")["answers"] > 3, "the load has begun")
        os.kill(serving.serving("lost")["pid"], signal.SIGKILL)
        wait_until(lambda: load.ask("count")["errors"] > 0, "the requests in flight are told")
        seen = load.ask("count")["answers"]
        wait_until(lambda: load.ask("count")["answers"] > seen + 5, "the model serves again")
        # The idle client had no request in the lost worker, so it sends its next request over a new connection.
        assert idle.ask("infer 0 1 2 1 4 1")["outputs"]["y"]["values"] == [1.0, 2.0, 3.0, 4.0]
        found = load.ask("stop")
    assert 1 <= len(found["errors"]) <= 3
    assert {error["code"] for error in found["errors"]} == {"unavailable.worker_lost"}
    assert all(error["retryable"] for error in found["errors"])


# --- sessions -------------------------------------------------------------------------------------


@contextlib.contextmanager
def session(driver: Path, device: Device, model: str) -> Iterator[Lines]:
    with running(driver, device.socket, model, 20_000, "session") as lines:
        assert lines.answer() == {"connected": True}
        yield lines


def first_sum(lines: Lines) -> float:
    """Return the first value of the answer to 1, 2, 3, 4."""
    return float(lines.ask("infer 0 0 2 1 4 1")["outputs"]["y"]["values"][0])


def test_sessions_of_c_move_with_their_state(serving: Device, driver: Path) -> None:
    serving.put(model="sums", op="add", state_id="v1")
    with session(driver, serving, "sums") as one, session(driver, serving, "sums") as other:
        assert [first_sum(one) for _ in range(3)] == [1, 2, 3]
        assert first_sum(other) == 1
        serving.replace("sums", op="add", state_id="v1", release=2)
        assert [first_sum(one), first_sum(other)] == [4, 2]
        serving.replace("sums", op="add", state_id="v2", release=3)
        lost = one.ask("infer 0 0 2 1 4 1")
        assert (lost["code"], lost["retryable"]) == ("request.session_lost", 0)
        assert "started with release 2, which no longer serves" in lost["message"]
        assert one.ask("infer 0 0 2 1 4 1")["code"] == "request.session_lost"


def test_c_gets_the_error_of_a_session_that_was_lost_with_its_worker(serving: Device, driver: Path) -> None:
    serving.put(model="crashes", op="add", state_id="v1")
    with session(driver, serving, "crashes") as lines:
        assert first_sum(lines) == 1
        os.kill(serving.serving("crashes")["pid"], signal.SIGKILL)
        assert lines.ask("infer 0 0 2 1 4 1")["code"] == "request.session_lost"


def test_c_gets_the_error_of_a_model_without_sessions(serving: Device, driver: Path) -> None:
    done = subprocess.run(
        [driver, serving.socket, "echo", "20000", "session"], capture_output=True, text=True, timeout=60
    )
    assert "send its requests without a session" in json.loads(done.stdout)["message"]


def test_the_program_on_the_clients_page_compiles(built: Callable[[Path], Path], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "clients.md").read_text()
    source = tmp_path / "page.c"
    source.write_text(page.split("```c\n")[1].split("```")[0])
    built(source)


def test_the_wheel_contains_the_header(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", os.fspath(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert wheel.read("edgert/include/edgert.h") == Path(edgert.include_dir(), "edgert.h").read_bytes()


def test_the_example_prints_the_outputs(serving: Device, built: Callable[[Path], Path], tmp_path: Path) -> None:
    program = built(ROOT / "examples" / "c" / "classify.c")
    values = tmp_path / "values.f32"
    values.write_bytes(np.array([1, 2, 3, 4.5], np.float32).tobytes())
    environment = {**os.environ, "EDGERT_SOCKET": os.fspath(serving.socket)}
    given = subprocess.run([program, "echo", values, serving.socket], capture_output=True, text=True, timeout=60)
    assert (given.stdout, given.returncode) == ("y FP32 [1, 4]: 1 2 3 4.5\n", 0)
    zeros = subprocess.run([program, "echo"], capture_output=True, text=True, timeout=60, env=environment)
    assert (zeros.stdout, zeros.returncode) == ("y FP32 [1, 4]: 0 0 0 0\n", 0)
    unknown = subprocess.run([program, "nothing"], capture_output=True, text=True, timeout=60, env=environment)
    assert unknown.returncode == 1
    assert "request.model_not_found" in unknown.stderr


# --- against simulated daemons ------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n" + bytes(64),
        wire.json_frame(wire.PONG, {}),
        wire.json_frame(wire.WELCOME, {"models": []}),
        changed(WELCOME_FRAME, 32, 255, 255, 255, 255, 255, 255, 255, 255),
    ],
    ids=["http", "pong", "other-welcome", "length"],
)
def test_c_refuses_an_answer_of_another_protocol(driver: Path, tmp_path: Path, said: bytes) -> None:
    with false_daemon(tmp_path, [said]) as path:
        assert refusal(driver, path)["code"] == "request.protocol"


@pytest.mark.parametrize(
    "said",
    [
        changed(RESULT, 8, 2),
        changed(RESULT, 64, 1),
        changed(RESULT, 65, 99),
        changed(RESULT, 72, 17),
        changed(RESULT, 6, wire.FLAG_SHARED),
        WELCOME_FRAME,
        bytes(64),
    ],
    ids=["request-id", "output-number", "datatype", "bytes", "shared", "kind", "zeros"],
)
def test_c_refuses_an_invalid_answer_and_connects_anew(driver: Path, tmp_path: Path, said: bytes) -> None:
    good = [WELCOME_FRAME, changed(RESULT, 8, 2)]
    with false_daemon(tmp_path, [WELCOME_FRAME, said], good) as path, client(driver, path) as echo:
        assert echo.ask("infer 0 0 2 1 4 1")["code"] == "request.protocol"
        assert echo.ask("infer 0 0 2 1 4 1")["outputs"]["y"]["values"] == [1.0] * 4


def test_c_asks_again_after_moved_and_never_after_a_lost_worker(driver: Path, tmp_path: Path) -> None:
    moved, good = [WELCOME_FRAME, wire.json_frame(wire.MOVED, {})], [WELCOME_FRAME, changed(RESULT, 8, 2)]
    with false_daemon(tmp_path, moved, good) as path, client(driver, path) as echo:
        assert echo.ask("infer 0 0 2 1 4 1")["outputs"]["y"]["values"] == [1.0] * 4
    path.unlink()
    with false_daemon(tmp_path, [WELCOME_FRAME, None], good) as path, client(driver, path) as echo:
        assert echo.ask("infer 0 0 2 1 4 1")["code"] == "unavailable.worker_lost"
        assert echo.ask("infer 0 0 2 1 4 1")["outputs"]["y"]["values"] == [1.0] * 4


def test_c_waits_for_a_daemon_whose_queue_is_full_until_the_deadline(driver: Path, tmp_path: Path) -> None:
    path = tmp_path / "full.sock"
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(os.fspath(path))
        listener.listen(1)
        for _ in range(2):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(os.fspath(path))
        assert refusal(driver, path, timeout_ms=200)["code"] == "request.deadline_exceeded"


def test_c_waits_for_a_model_until_the_deadline(driver: Path, tmp_path: Path) -> None:
    loading = wire.error_frame(Unavailable("the model is being loaded", retry_after_s=0.05))
    with false_daemon(tmp_path, [loading], [loading], [WELCOME_FRAME]) as path, client(driver, path):
        pass
    path.unlink()
    past_the_deadline = wire.error_frame(Unavailable("the model is being loaded", retry_after_s=3600.0))
    with false_daemon(tmp_path, [loading], [past_the_deadline]) as path:
        late = refusal(driver, path, timeout_ms=60_000)
        assert (late["code"], late["retry_after_ms"]) == ("unavailable", 3_600_000)
    path.unlink()
    with false_daemon(tmp_path, [b""]) as path:
        late = refusal(driver, path, timeout_ms=200)
        assert late["code"] == "request.deadline_exceeded"
        assert f"nothing answered at {path} in time: check with edgertd status" in late["message"]


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "not-sealed"])
def test_c_uses_only_memory_that_cannot_shrink(driver: Path, tmp_path: Path, sealed: bool) -> None:
    """The answer is in shared memory, and a MOVED follows its header: C reads both frames or neither."""
    made = SharedArea.create(65536)
    assert made is not None
    area, descriptor = made
    if not sealed:
        os.close(descriptor)
        descriptor = os.memfd_create("edgert-unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, 2 * 65536)
    area.response[64 : len(RESULT)] = RESULT[64:]
    said = changed(RESULT[:64], 6, wire.FLAG_SHARED) + wire.json_frame(wire.MOVED, {})
    good = [WELCOME_FRAME, changed(RESULT, 8, 3 if sealed else 2)]  # the MOVED costs a number
    with false_daemon(tmp_path, [WELCOME_FRAME, said], good, memory=descriptor) as path, client(driver, path) as echo:
        first = echo.ask("infer 0 0 2 1 4 1")
        if sealed:
            assert first["outputs"]["y"]["values"] == [1.0] * 4
        else:
            assert first["code"] == "request.protocol"
        assert echo.ask("infer 0 0 2 1 4 1")["outputs"]["y"]["values"] == [1.0] * 4
    os.close(descriptor)


def test_a_system_header_before_edgert_h_is_an_error_with_the_next_step(tmp_path: Path) -> None:
    source = tmp_path / "late.c"
    source.write_text('#include <stdio.h>\n#define EDGERT_IMPLEMENTATION\n#include "edgert.h"\n')
    command = [
        compiler(),
        "-std=c99",
        f"-I{edgert.include_dir()}",
        "-c",
        os.fspath(source),
        "-o",
        os.fspath(tmp_path / "late.o"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "move edgert.h to the top" in done.stderr
    assert subprocess.run([*command, "-D_POSIX_C_SOURCE=200809L"], timeout=60).returncode == 0


def test_c_looks_for_the_socket_in_the_same_places_as_python(
    serving: Device, built: Callable[[Path], Path], tmp_path: Path
) -> None:
    """The client uses the first existing socket, not the default path of this user's daemon."""
    program = built(ROOT / "examples" / "c" / "classify.c")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EDGERT_")} | {"HOME": os.fspath(tmp_path)}
    if default_socket_of(environment).exists():
        pytest.skip("a daemon of this machine's own listens here")
    users = tmp_path / ".local/state/edgert"
    users.mkdir(parents=True)
    (users / "edgert.sock").symlink_to(serving.socket)
    assert default_socket_of(environment) == users / "edgert.sock"
    found = subprocess.run([program, "echo"], capture_output=True, text=True, timeout=60, env=environment)
    assert (found.stdout, found.returncode) == ("y FP32 [1, 4]: 0 0 0 0\n", 0)
    (users / "edgert.sock").unlink()
    gone = subprocess.run([program, "echo"], capture_output=True, text=True, timeout=60, env=environment)
    assert os.fspath(default_socket_of(environment)) in gone.stderr
    own = {**environment, "EDGERT_STATE": os.fspath(serving.state.root)}
    assert subprocess.run([program, "echo"], capture_output=True, timeout=60, env=own).returncode == 0


def default_socket_of(environment: dict[str, str]) -> Path:
    """Return the default socket of the Python client in this environment."""
    words = [sys.executable, "-c", "from edgert.state_dir import default_socket; print(default_socket())"]
    return Path(subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout.strip())

"""Hostile or broken clients: memory and descriptors stay bounded, and a good client is served."""

from __future__ import annotations

import array
import contextlib
import os
import pwd
import random
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgert.config import ServingConfig
from edgert.daemon.sockets.acceptor import ACCEPTS_MAX, ACCEPTS_PER_S_MAX, BURST_MAX, PENDING_MAX, Acceptor, is_allowed
from edgert.machine import process_mb
from edgert.protocol import wire
from edgert.protocol.frame_buffer import FrameBuffer
from tests.support.clients import HELLO, ITEM, greeted, raw, read_frame, request
from tests.support.devices import WAIT_S_MAX, Device, a_device, wait_until

CONNECTIONS = 2000
GROWTH_MB_MAX = 64.0
SEED = 20_240_501


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with a_device("[serving]\nconnections_max = 64\nframe_mb = 1.0\n") as device:
        device.put()
        yield device


@pytest.fixture(autouse=True)
def nothing_is_left_behind(device: Device) -> Iterator[None]:
    """Check that the daemon has the same descriptors and about the same memory after each test."""
    wait_until(lambda: device.serving()["connections"] == 0, "the clients of the test before are gone")
    pids, before = _pids(device), _held(device)
    yield
    with device.client() as client:
        assert client.infer("echo", ITEM, cache=False)["y"].tolist() == ITEM.tolist()
    assert _pids(device) == pids  # no process ended
    wait_until(lambda: _descriptors(device) <= before[0] + 1, "the descriptors are back")
    assert _held(device)[1] < before[1] + GROWTH_MB_MAX


def _pids(device: Device) -> list[int]:
    return [int(device.state.pid.read_text()), device.serving()["pid"]]


def _descriptors(device: Device) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in _pids(device))


def _held(device: Device) -> tuple[int, float]:
    return _descriptors(device), sum(process_mb(pid) or 0 for pid in _pids(device))


def ends(sock: socket.socket) -> bool:
    """Return whether the daemon answers with whole frames only and then closes."""
    frames = FrameBuffer()
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(65536):
            while data:
                part, data = data[: len(frames.room)], data[len(frames.room) :]
                frames.room[: len(part)] = part
                frame = frames.feed(len(part))
                while frame is not None:
                    assert frame.kind in (wire.WELCOME, wire.ERROR, wire.RESULT, wire.PONG)
                    frame = frames.feed(0) if frames.more else None
    return True


def test_frames_with_flipped_bytes_are_answered_or_end_the_connection(device: Device) -> None:
    """The test flips each byte of the header and the descriptors in turn, and many other bytes at random."""
    draw = random.Random(SEED)
    good = request()
    cases = [bytes([*good[:i], good[i] ^ 0xFF, *good[i + 1 :]]) for i in range(128)]
    for _ in range(300):
        spoiled = bytearray(good)
        for _ in range(draw.randint(1, 8)):
            spoiled[draw.randrange(len(spoiled))] = draw.randrange(256)
        cases.append(bytes(spoiled))
    for case in cases:
        with raw(device) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(HELLO + case)
                sock.shutdown(socket.SHUT_WR)
            assert ends(sock)


def test_frames_that_are_cut_short_end_the_connection(device: Device) -> None:
    whole = HELLO + request()
    for length in range(0, len(whole), 7):
        with raw(device) as sock:
            sock.sendall(whole[:length])
            sock.shutdown(socket.SHUT_WR)
            assert ends(sock)


@pytest.mark.parametrize("body", [2**20, 2**31, 2**40, 2**64 - 64, 2**64 - 1], ids=hex)
def test_false_lengths_take_no_memory(device: Device, body: int) -> None:
    header = wire.HEADER.pack(wire.MAGIC, wire.VERSION, wire.INFER, 0, 1, 0, 0, 0, 1, 0, body, *(0,) * 6)
    for hello in (HELLO, b""):
        with raw(device) as sock:
            sock.sendall(hello + header)
            frame = read_frame(sock)
            if frame.kind == wire.WELCOME:
                frame = read_frame(sock)
            assert wire.error_of(frame).code == "request.protocol"


def test_a_tensor_that_is_larger_than_its_frame_is_refused(device: Device) -> None:
    with greeted(device) as sock:
        lie = wire.OutTensor(wire.descriptor(0, "FP32", (2**20, 4), 16 * 2**20), ITEM.tobytes())
        sock.sendall(b"".join(wire.frame(wire.INFER, request_id=1, tensors=[lie])))
        assert wire.error_of(read_frame(sock)).code == "request.protocol"
        assert ends(sock)


def test_many_silent_connections_do_not_keep_other_clients_out(device: Device) -> None:
    silent = []
    try:
        for _ in range(CONNECTIONS):
            sock = socket.socket(socket.AF_UNIX)  # a connect blocks while the backlog is full
            sock.connect(os.fspath(device.socket))
            sock.send(HELLO[:10])
            silent.append(sock)
        with device.client(WAIT_S_MAX) as client:
            for _ in range(20):
                assert client.infer("echo", ITEM, cache=False)["y"].tolist() == ITEM.tolist()
        assert _descriptors(device) < PENDING_MAX + 200
    finally:
        for sock in silent:
            sock.close()


def test_a_flood_is_accepted_at_a_bounded_rate_and_no_connection_is_lost(tmp_path: Path) -> None:
    now_s, routed = [0.0], 0

    def route(sock: socket.socket, hello: dict[str, object]) -> None:
        nonlocal routed
        routed += 1
        sock.close()

    with contextlib.ExitStack() as held:
        selector = held.enter_context(selectors.DefaultSelector())
        acceptor = Acceptor(ServingConfig(), selector, route, lambda: now_s[0])
        listener = held.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(os.fspath(tmp_path / "s"))
        listener.listen(BURST_MAX + 100)
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, lambda: acceptor.accept(listener))
        for _ in range(BURST_MAX + 100):
            sock = held.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(os.fspath(tmp_path / "s"))
            sock.sendall(HELLO)

        def turns() -> None:
            for _ in range(BURST_MAX // ACCEPTS_MAX + 5):
                for key, _ in selector.select(0):
                    key.data()
                acceptor.tick()

        turns()
        assert routed == BURST_MAX
        assert acceptor.due_s() is not None
        now_s[0] += 50 / ACCEPTS_PER_S_MAX
        turns()
        assert routed == BURST_MAX + 50
        now_s[0] += 1.0
        turns()
        assert routed == BURST_MAX + 100


def test_clients_beyond_the_limit_are_refused_with_an_error_and_the_others_are_served(device: Device) -> None:
    silent, refused = [], 0
    with device.client() as client:
        client.infer("echo", ITEM)  # a good client that connected earlier
        try:
            for _ in range(100):
                sock = raw(device)
                silent.append(sock)
                sock.sendall(HELLO)
                frame = read_frame(sock)
                refused += frame.kind == wire.ERROR and wire.error_of(frame).code == "unavailable.overloaded"
            assert refused == 100 - 63
            for _ in range(20):
                assert client.infer("echo", ITEM, cache=False)["y"].tolist() == ITEM.tolist()
        finally:
            for sock in silent:
                sock.close()


def test_descriptors_that_a_client_sends_are_refused_or_closed(device: Device) -> None:
    passed = os.open("/dev/null", os.O_RDONLY)
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [passed] * 200))]

    def send(sock: socket.socket, frame: bytes) -> None:
        try:
            sock.sendmsg([frame], attached)
        except PermissionError:  # since Linux 6.16, the daemon's kernel refuses them
            sock.sendall(frame)

    before = _descriptors(device)
    with contextlib.ExitStack() as held:
        held.callback(os.close, passed)
        for _ in range(10):
            silent = held.enter_context(raw(device))
            send(silent, HELLO[:20])  # the supervisor reads this
            sock = held.enter_context(raw(device))
            send(sock, HELLO)
            assert read_frame(sock).kind == wire.WELCOME
            for _ in range(3):
                send(sock, request())  # the worker reads this
                assert read_frame(sock).kind == wire.RESULT
        assert _descriptors(device) < before + 50


def test_a_client_that_never_reads_loses_only_its_own_connection(device: Device) -> None:
    large = np.zeros((1000, 4), np.float32)
    with contextlib.ExitStack() as held:
        for _ in range(8):
            sock = held.enter_context(greeted(device))
            sock.settimeout(0.2)
            with contextlib.suppress(TimeoutError, ConnectionError):
                for i in range(10_000):
                    sock.sendall(request(i, large))
        with device.client(WAIT_S_MAX) as client:
            for _ in range(20):
                assert client.infer("echo", ITEM, cache=False)["y"].tolist() == ITEM.tolist()


def test_slow_senders_do_not_delay_other_clients(device: Device) -> None:
    with contextlib.ExitStack() as held:
        slow = [held.enter_context(raw(device)) for _ in range(20)]
        data = HELLO + request()
        for i in range(len(data) - 1):
            for sock in slow:
                sock.send(data[i : i + 1])
            if i % 64 == 0:
                with device.client(WAIT_S_MAX) as client:
                    assert client.infer("echo", ITEM, cache=False)["y"].tolist() == ITEM.tolist()
        for sock in slow:
            sock.send(data[-1:])
            assert [read_frame(sock).kind, read_frame(sock).kind] == [wire.WELCOME, wire.RESULT]


def test_a_client_that_disconnects_at_once_leaves_no_connection(device: Device) -> None:
    for i in range(500):
        with raw(device) as sock:
            if i % 2:
                sock.sendall(HELLO)


def test_the_control_socket_refuses_invalid_commands(device: Device) -> None:
    assert device.state.control_socket.stat().st_mode & 0o777 == 0o600
    assert device.socket.stat().st_mode & 0o777 == 0o660
    for data in (
        b"\n",
        b"{}\n",
        b"[1]\n",
        b'{"op": "sync"}\n',
        b"\xff\n",
        b'{"op": "dance"}\n',
        b"[" * 100_000 + b"\n",
    ):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(WAIT_S_MAX)
            sock.connect(os.fspath(device.state.control_socket))
            with contextlib.suppress(ConnectionError):  # the daemon may already have read enough to answer
                sock.sendall(data)
            assert b'"error"' in sock.recv(65536)


def test_the_daemon_raises_its_limit_of_descriptors(device: Device) -> None:
    limits = Path(f"/proc/{_pids(device)[0]}/limits").read_text()
    soft, hard = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3:5]
    assert soft == hard == str(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


# --- who may connect ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("serving", "allowed"),
    [
        (ServingConfig(), True),
        (ServingConfig(allow_uids=(12345,)), True),  # the daemon's own user may always connect
        (ServingConfig(allow_gids=(12345,)), True),
    ],
)
def test_the_daemons_own_user_may_always_connect(serving: ServingConfig, allowed: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert is_allowed(ours, serving) is allowed


ASK = """
import os, socket, sys
path, uid, gid, groups = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), eval(sys.argv[4])
sys.path.insert(0, sys.argv[5])
from edgert.protocol import wire
from edgert.protocol.frame_buffer import FrameBuffer
os.setgroups(groups); os.setgid(gid); os.setuid(uid)
sock = socket.socket(socket.AF_UNIX); sock.settimeout(120); sock.connect(path)
sock.sendall(wire.json_frame(wire.HELLO, {"model": "echo"}))
data = sock.recv(65536)
print(wire.HEADER.unpack_from(data)[2], wire.HEADER.unpack_from(data)[9])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as somebody else")
def test_only_listed_users_and_groups_may_connect() -> None:
    nobody = pwd.getpwnam("nobody")
    config = f'socket_group = "nogroup"\n[serving]\nallow_uids = [{nobody.pw_uid}]\nallow_gids = [4242]\n'
    with a_device(config) as device:
        device.put()
        assert device.socket.stat().st_gid == nobody.pw_gid
        for folder in (device.folder, device.state.root):
            folder.chmod(0o755)
        device.socket.chmod(0o666)

        def ask(uid: int, gid: int, groups: tuple[int, ...] = ()) -> list[int]:
            words = [os.fspath(device.socket), str(uid), str(gid), repr(list(groups)), os.fspath(Path.cwd())]
            done = subprocess.run(
                [sys.executable, "-c", ASK, *words], capture_output=True, text=True, timeout=WAIT_S_MAX
            )
            assert done.returncode == 0, done.stderr
            return [int(word) for word in done.stdout.split()]

        assert ask(nobody.pw_uid, nobody.pw_gid)[0] == wire.WELCOME
        assert ask(4243, 4242)[0] == wire.WELCOME
        assert ask(4243, 4243, (4242,))[0] == wire.WELCOME
        assert ask(4243, 4243) == [wire.ERROR, 14]


def test_an_unknown_group_is_reported(tmp_path: Path) -> None:
    with a_device('socket_group = "no-such-group"\n', started=False) as device:
        assert device.run("start", code=7)["error"]["message"].count("no-such-group") == 1


def test_an_endless_hello_is_cut_off(device: Device) -> None:
    began = time.monotonic()
    with raw(device) as sock:
        sock.sendall(HELLO[:70])
        assert wire.error_of(read_frame(sock)).code == "request.protocol"
        assert time.monotonic() - began > 2
        assert ends(sock)

"""A hostile registry or network: each attack of TUF's list is refused with its own error.

The list: https://theupdateframework.github.io/specification/latest/#goals-to-protect-against-specific-attacks. A
device installs only content that a trusted key signed, and the live version continues to serve.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from edgert.bundle.channel import Entry, sign_statement
from edgert.bundle.envelope import CHANNEL_PAYLOAD_TYPE, sign
from edgert.bundle.expiry import expiry_time
from edgert.bundle.signing import new_key
from edgert.config import read_config
from edgert.errors import (
    ChannelExpired,
    ChannelInvalid,
    ChannelMismatch,
    ChannelTooOld,
    EdgeRTError,
    RegistryCorrupt,
    RegistryError,
    RegistryUnreachable,
    SignatureInvalid,
)
from edgert.registry.address import digest_of
from edgert.versions.install import install
from edgert.versions.slot_store import SlotStore
from tests.support.devices import Device
from tests.support.servers.hostile_registry import STATEMENT, HostileRegistry, send
from tests.support.stand_ins.following import Events, failure_of, followed, following

ENDLESS_BYTES = 64 * 1024**2  # the number of bytes that an attacker sends at most


@pytest.fixture
def device(tmp_path: Path) -> Device:
    """A device whose daemon does not run. The slots contain the releases that the follower accepted."""
    device = Device(tmp_path)
    device.prepare()
    return device


@pytest.fixture
def entry(device: Device, registry: HostileRegistry) -> Entry:
    """An entry of the channel for a release in the registry."""
    return registry.put_release(device.bundle(release=5, padding=b"w" * 100_000))


def release(device: Device) -> int | None:
    """The release that is live, or on trial."""
    live = SlotStore(device.state.models / "echo").read().live
    return None if live is None else live.release


def answering(path_part: str, answer: Callable[[BaseHTTPRequestHandler], object]) -> Callable[..., bool]:
    """Return a fault that answers requests with `path_part` in their path."""

    def fault(request: BaseHTTPRequestHandler) -> bool:
        if path_part in request.path:
            answer(request)
            return True
        return False

    return fault


# --- statements -----------------------------------------------------------------------------------


def test_an_older_statement_is_refused_as_a_rollback(device: Device, registry: HostileRegistry, entry: Entry) -> None:
    registry.put_channel(device.key, 7)
    followed(following(device, registry.address))
    registry.put_channel(device.key, 6, entry)
    assert isinstance(failure_of(following(device, registry.address)), ChannelTooOld)
    assert release(device) is None


def test_a_second_statement_with_the_same_counter_is_refused(
    device: Device, registry: HostileRegistry, entry: Entry
) -> None:
    registry.put_channel(device.key, 7)
    followed(following(device, registry.address))
    registry.put_channel(device.key, 7, entry)
    assert isinstance(failure_of(following(device, registry.address)), ChannelTooOld)
    assert release(device) is None


def test_a_channel_cannot_go_back_to_an_older_release_without_a_signed_downgrade(
    device: Device, registry: HostileRegistry, entry: Entry
) -> None:
    install(device.bundle(release=6), device.state, read_config(device.state))
    store = SlotStore(device.state.models / "echo")
    store.activate(60)
    store.mark_good()
    registry.put_channel(device.key, 1, entry)
    assert "older than 6" in followed(following(device, registry.address))[0]
    assert release(device) == 6


def test_an_expired_statement_is_refused_and_raises_an_alarm(
    device: Device, registry: HostileRegistry, entry: Entry
) -> None:
    events = Events()
    before, after = expiry_time("2026-06-01T00:00:00Z"), expiry_time("2026-08-01T00:00:00Z")
    times = {"issued": "2026-05-01T00:00:00Z", "expires": "2026-07-01T00:00:00Z"}
    registry.put_channel(device.key, 1, **times)
    follower = following(device, registry.address, events, now_s=before)
    _set_files_to_1970(device)
    followed(follower)
    registry.put_channel(device.key, 2, entry, **times)
    assert isinstance(failure_of(following(device, registry.address, events, now_s=after)), ChannelExpired)
    assert events.names == ["channel_refused", "alarm_raised"]
    assert release(device) is None


def test_an_expired_statement_is_refused_although_the_clock_is_set_back(
    device: Device, registry: HostileRegistry, entry: Entry
) -> None:
    _set_files_to_1970(device)
    registry.put_channel(device.key, 2, issued="2026-09-01T00:00:00Z")
    followed(following(device, registry.address, now_s=0.0))
    _set_files_to_1970(device)
    registry.put_channel(device.key, 3, entry, issued="2026-05-01T00:00:00Z", expires="2026-07-01T00:00:00Z")
    assert isinstance(failure_of(following(device, registry.address, now_s=0.0)), ChannelExpired)
    assert release(device) is None


def test_a_foreign_key_is_refused(device: Device, registry: HostileRegistry, entry: Entry) -> None:
    registry.put_channel(new_key(), 1, entry)
    assert isinstance(failure_of(following(device, registry.address)), SignatureInvalid)
    assert release(device) is None


def test_a_signed_manifest_in_place_of_a_statement_is_refused(
    device: Device, registry: HostileRegistry, entry: Entry
) -> None:
    registry.put_envelope(registry.blobs[f"sha256:{entry.envelope}"])
    assert isinstance(failure_of(following(device, registry.address)), ChannelInvalid)


def test_the_statement_of_another_channel_is_refused(device: Device, registry: HostileRegistry, entry: Entry) -> None:
    canary = replace(STATEMENT, channel="canary", entries=(entry,))
    registry.put_envelope(sign_statement(canary, device.key), "stable")
    failure = failure_of(following(device, registry.address))
    assert isinstance(failure, ChannelInvalid)
    assert "channel canary for channel stable" in failure.message
    assert release(device) is None


def test_a_revoked_key_signs_neither_a_statement_nor_a_bundle(device: Device, registry: HostileRegistry) -> None:
    stolen, safe = device.key, new_key()
    (device.state.keys / "safe.pem").write_bytes(safe.public.pem())
    entry = registry.put_release(device.bundle(release=5))
    registry.put_channel(safe, 2, revoked=(stolen.public.key_id,))
    followed(following(device, registry.address))
    registry.put_channel(stolen, 3, entry)
    assert isinstance(failure_of(following(device, registry.address)), SignatureInvalid)
    registry.put_channel(safe, 4, entry)
    assert "is not tried again: the bundle is signed by key" in followed(following(device, registry.address))[0]
    with pytest.raises(SignatureInvalid):
        install(device.bundle(release=5), device.state, read_config(device.state))
    assert release(device) is None


def test_a_statement_that_revokes_its_own_key_is_refused(device: Device, registry: HostileRegistry) -> None:
    statement = replace(STATEMENT, revoked=(device.key.public.key_id,))
    registry.put_envelope(sign(statement.to_bytes(), device.key, CHANNEL_PAYLOAD_TYPE))
    assert isinstance(failure_of(following(device, registry.address)), SignatureInvalid)


# --- releases -------------------------------------------------------------------------------------


def test_the_envelope_of_another_release_is_refused(device: Device, registry: HostileRegistry, entry: Entry) -> None:
    other = registry.put_release(device.bundle(release=4))
    registry.blobs[f"sha256:{entry.envelope}"] = registry.blobs[f"sha256:{other.envelope}"]
    registry.put_channel(device.key, 1, entry)
    assert isinstance(failure_of(following(device, registry.address)), RegistryCorrupt)
    assert release(device) is None


def test_a_statement_that_names_another_release_than_its_bundle_is_refused(
    device: Device, registry: HostileRegistry, entry: Entry
) -> None:
    events = Events()
    other = registry.put_release(device.bundle(release=4))
    registry.put_channel(device.key, 1, replace(entry, envelope=other.envelope))
    followed(following(device, registry.address, events))
    assert [fields["code"] for _, _, fields in events] == [ChannelMismatch.code]
    assert release(device) is None


def test_a_file_with_other_bytes_is_refused_and_fetched_again_in_the_next_round(
    device: Device, registry: HostileRegistry, entry: Entry
) -> None:
    registry.put_channel(device.key, 1, entry)
    digest, weights = max(registry.blobs.items(), key=lambda item: len(item[1]))
    registry.blobs[digest] = b"X" + weights[1:]
    assert isinstance(failure_of(following(device, registry.address)), RegistryCorrupt)
    assert release(device) is None
    registry.blobs[digest] = weights
    assert followed(following(device, registry.address)) == ["release 5 of echo is on trial"]


def test_truncated_files_are_continued_and_never_installed_as_they_are(
    device: Device, registry: HostileRegistry, entry: Entry
) -> None:
    registry.put_channel(device.key, 1, entry)
    digest, weights = max(registry.blobs.items(), key=lambda item: len(item[1]))

    def cut(request: BaseHTTPRequestHandler) -> None:
        at = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        request.send_response(206 if at else 200)
        request.send_header("Content-Length", str(len(weights) - at))
        request.send_header("Content-Range", f"bytes {at}-{len(weights) - 1}/{len(weights)}")
        request.end_headers()
        request.wfile.write(weights[at : at + 10_000])
        request.close_connection = True

    registry.fault = answering(digest, cut)
    assert followed(following(device, registry.address)) == ["release 5 of echo is on trial"]
    assert sum(digest in path for path in registry.asked) == 10


def test_fetched_bytes_are_kept_for_the_next_process(device: Device, registry: HostileRegistry, entry: Entry) -> None:
    registry.put_channel(device.key, 1, entry)
    digest, weights = max(registry.blobs.items(), key=lambda item: len(item[1]))

    def half(request: BaseHTTPRequestHandler) -> None:
        if "Range" in request.headers:
            send(request, 503)
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(weights)))
        request.end_headers()
        request.wfile.write(weights[:90_000])
        request.close_connection = True

    registry.fault = answering(digest, half)
    assert isinstance(failure_of(following(device, registry.address)), RegistryUnreachable)
    registry.fault, registry.sent_bytes = lambda request: False, 0
    assert followed(following(device, registry.address)) == ["release 5 of echo is on trial"]
    assert registry.sent_bytes < 20_000


def test_a_registry_that_has_only_a_part_of_a_release_installs_nothing(
    device: Device, registry: HostileRegistry, entry: Entry
) -> None:
    registry.put_channel(device.key, 1, entry)
    digest = max(registry.blobs, key=lambda each: len(registry.blobs[each]))
    del registry.blobs[digest]
    assert failure_of(following(device, registry.address)).code == "registry.not_found"
    assert release(device) is None


# --- answers that are endless, slow or meaningless --------------------------------------------


def _endless(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    piece = b"%x\r\n" % 65536 + b" " * 65536 + b"\r\n"
    with contextlib.suppress(OSError):
        for _ in range(ENDLESS_BYTES // 65536):
            request.wfile.write(piece)
    request.close_connection = True


@pytest.mark.parametrize("part", ["manifests/", "blobs/"])
def test_endless_data_is_not_read(device: Device, registry: HostileRegistry, entry: Entry, part: str) -> None:
    registry.put_channel(device.key, 1, entry)
    registry.fault = answering(part, _endless)
    assert isinstance(failure_of(following(device, registry.address)), RegistryCorrupt)
    assert release(device) is None


def test_endless_data_for_a_file_stops_at_its_signed_size(
    device: Device, registry: HostileRegistry, entry: Entry
) -> None:
    registry.put_channel(device.key, 1, entry)
    digest = max(registry.blobs, key=lambda each: len(registry.blobs[each]))
    registry.fault = answering(digest, _endless)
    assert isinstance(failure_of(following(device, registry.address)), RegistryCorrupt)
    assert sum(path.stat().st_size for path in device.state.incoming.iterdir()) < 200_000


def test_a_slow_download_ends_at_its_limit(device: Device, registry: HostileRegistry) -> None:
    def drip(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "1000")
        request.end_headers()
        for _ in range(1000):  # each byte arrives long before the time-out for the next byte
            request.wfile.write(b" ")
            if registry.stopping.wait(0.05):
                return

    registry.fault = answering("manifests/", drip)
    assert isinstance(failure_of(following(device, registry.address, answer_s=0.5)), RegistryUnreachable)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda request: send(request, 500, b"oops"), RegistryUnreachable),
        (lambda request: send(request, 418, b"oops"), RegistryError),
        (lambda request: send(request, 200, b"\x00garbage"), RegistryCorrupt),
        (lambda request: send(request, 200, b"[" * 100_000), RegistryCorrupt),
        (lambda request: send(request, 200, json.dumps({"layers": []}).encode()), RegistryCorrupt),
        (lambda request: request.wfile.write(b"SSH-2.0-OpenSSH\r\n\r\n"), RegistryUnreachable),
        (lambda request: send(request, 307, b"", {"Location": request.path}), RegistryError),
        (lambda request: send(request, 307, b"", {"Location": "file:///etc/passwd"}), RegistryError),
        (lambda request: send(request, 401, b"", {"WWW-Authenticate": "Basic"}), RegistryError),
    ],
)
def test_invalid_answers_of_a_registry_are_refused(
    device: Device,
    registry: HostileRegistry,
    answer: Callable[[BaseHTTPRequestHandler], object],
    error: type[EdgeRTError],
) -> None:
    registry.fault = answering("manifests/", answer)
    assert isinstance(failure_of(following(device, registry.address)), error)
    assert release(device) is None


def test_a_false_answer_that_nothing_changed_does_not_hide_a_release_from_the_next_round(
    device: Device, registry: HostileRegistry, entry: Entry
) -> None:
    registry.put_channel(device.key, 1, entry)
    registry.fault = answering("manifests/", lambda request: send(request, 304))
    assert isinstance(failure_of(following(device, registry.address)), RegistryError)
    registry.fault = lambda request: False
    assert followed(following(device, registry.address)) == ["release 5 of echo is on trial"]


def test_a_layer_with_a_false_size_is_refused(device: Device, registry: HostileRegistry, entry: Entry) -> None:
    statement = registry.put_channel(device.key, 1, entry)
    digest = digest_of(sign_statement(statement, device.key))
    for size in (-1, 10**12, "1", None):
        oci = json.loads(registry.manifests["channel.stable"])
        oci["layers"] = [{**oci["layers"][0], "size": size, "digest": digest}]
        registry.manifests["channel.stable"] = json.dumps(oci).encode()
        assert isinstance(failure_of(following(device, registry.address)), RegistryCorrupt)


def _set_files_to_1970(device: Device) -> None:
    """Set the time of every file of the device to 1970, as a clock that was never set would."""
    for path in device.state.root.rglob("*"):
        os.utime(path, (0, 0))

"""A hostile registry with runtimes: a device creates environments only from content that a trusted key signed.

For attacks on statements, see tests/adversary/test_channels.py: a runtime has an entry like a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgert.bundle.channel import Entry
from edgert.bundle.envelope import RUNTIME_PAYLOAD_TYPE, sign
from edgert.bundle.runtime_release import RuntimeRelease, sign_runtime
from edgert.bundle.signing import new_key
from edgert.errors import BundleError, ChannelMismatch, RegistryCorrupt, ReleaseTooOld, SignatureInvalid
from edgert.follow.record import Record, RecordStore
from edgert.names import RUNTIME
from tests.support.devices import Device
from tests.support.runtime_homes import FIRST, release_of, stand_in_home
from tests.support.servers.hostile_registry import HostileRegistry
from tests.support.stand_ins.following import Events, failure_of, followed, following

BYTES = b"a wheel" * 10_000


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    """A device with a HOME, whose daemon does not run. After each test, the device still has its runtime."""
    device = Device(tmp_path)
    device.prepare()
    home = stand_in_home(tmp_path / "home")
    yield device
    assert (home / "venv").readlink().name == FIRST
    assert [path.name for path in (home / "venvs").iterdir()] == [FIRST]
    assert not (home / "trial").exists()


@pytest.fixture
def release(device: Device) -> RuntimeRelease:
    return release_of(5, BYTES, device)


def refused(device: Device, registry: HostileRegistry, entry: Entry) -> object:
    """Offer the entry for two rounds; return the code of the only event."""
    registry.put_channel(device.key, 1, entry)
    events = Events()
    for _ in range(2):
        follower = following(device, registry.address, events, home=device.folder / "home")
        assert "is not tried again" in followed(follower)[0]
    ((name, model, fields),) = events
    assert (name, model) == ("refused", RUNTIME)
    return fields["code"]


def test_a_runtime_of_a_foreign_key_is_refused(
    device: Device, registry: HostileRegistry, release: RuntimeRelease
) -> None:
    assert refused(device, registry, registry.put_runtime(release, BYTES, new_key())) == SignatureInvalid.code


def test_a_runtime_of_a_revoked_key_is_refused(
    device: Device, registry: HostileRegistry, release: RuntimeRelease
) -> None:
    stolen = new_key()
    (device.state.keys / "stolen.pem").write_bytes(stolen.public.pem())
    entry = registry.put_runtime(release, BYTES, stolen)
    registry.put_channel(device.key, 1, entry, revoked=(stolen.public.key_id,))
    events = Events()
    followed(following(device, registry.address, events, home=device.folder / "home"))
    assert [fields["code"] for _, _, fields in events] == [SignatureInvalid.code]


def test_a_signed_bundle_in_place_of_a_runtime_is_refused(
    device: Device, registry: HostileRegistry, release: RuntimeRelease
) -> None:
    entry = registry.put_runtime(release, BYTES, device.key)
    bundle = registry.put_release(device.bundle())
    assert refused(device, registry, replace(entry, envelope=bundle.envelope)) == "bundle.corrupt"


def test_the_envelope_of_another_runtime_is_refused(
    device: Device, registry: HostileRegistry, release: RuntimeRelease
) -> None:
    entry = registry.put_runtime(release, BYTES, device.key)
    other = registry.put_runtime(replace(release, release=4), BYTES, device.key)
    assert refused(device, registry, replace(entry, envelope=other.envelope)) == ChannelMismatch.code


def test_other_bytes_under_the_digest_of_an_envelope_are_refused(
    device: Device, registry: HostileRegistry, release: RuntimeRelease
) -> None:
    entry = registry.put_runtime(release, BYTES, device.key)
    registry.blobs[f"sha256:{entry.envelope}"] = sign_runtime(replace(release, release=4), device.key)
    registry.put_channel(device.key, 1, entry)
    assert isinstance(failure_of(following(device, registry.address, home=device.folder / "home")), RegistryCorrupt)


def test_a_wheel_with_other_bytes_is_refused_and_removed(
    device: Device, registry: HostileRegistry, release: RuntimeRelease
) -> None:
    registry.put_channel(device.key, 1, registry.put_runtime(release, BYTES, device.key))
    registry.blobs[f"sha256:{release.targets[0].wheels[0].sha256}"] = b"X" + BYTES[1:]
    assert isinstance(failure_of(following(device, registry.address, home=device.folder / "home")), RegistryCorrupt)
    assert not list(device.state.incoming.glob("*.part"))


def test_a_runtime_that_is_older_than_an_earlier_live_runtime_is_refused(
    device: Device, registry: HostileRegistry, release: RuntimeRelease
) -> None:
    device.state.follow.mkdir()
    RecordStore(device.state).write(Record(runtime=6))
    assert refused(device, registry, registry.put_runtime(release, BYTES, device.key)) == ReleaseTooOld.code


@pytest.mark.parametrize(
    "changes",
    [{"python": "2.7"}, {"machine": "riscv64"}, {"glibc": "9.99"}, {"engines": ("tflite",)}],
    ids=["python", "processor", "glibc", "engine"],
)
def test_a_runtime_that_does_not_fit_this_device_is_refused(
    device: Device, registry: HostileRegistry, changes: dict[str, object]
) -> None:
    entry = registry.put_runtime(release_of(5, BYTES, device, **changes), BYTES, device.key)
    assert refused(device, registry, entry) == "bundle.not_compatible"


@pytest.mark.parametrize(
    "value",
    [
        {"id": "../../../etc"},
        {"id": "0" * 15 + "/"},
        {"wheels": [{"name": "../../evil-1-py3-none-any.whl"}]},
        {"wheels": [{"name": "--pre-1-py3-none-any.whl"}]},
        {"wheels": [{"name": "a-1 --index-url=x-py3-none-any.whl"}]},
        {"wheels": [{"size_bytes": -1}]},
        {"engines": ["$(reboot)"]},
    ],
)
def test_a_signed_runtime_that_names_a_path_or_an_option_is_refused(
    device: Device, registry: HostileRegistry, release: RuntimeRelease, value: dict[str, object]
) -> None:
    document = json.loads(release.to_bytes())
    target = document["targets"][0]
    if "wheels" in value:
        value = {"wheels": [{**target["wheels"][0], **value["wheels"][0]}]}  # type: ignore[index]
    target.update(value)
    payload = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    envelope = sign(payload, device.key, RUNTIME_PAYLOAD_TYPE)
    entry = registry.put_runtime(release, BYTES, device.key)
    registry.put_blob(envelope)
    digest, of_envelope = (hashlib.sha256(each).hexdigest() for each in (payload, envelope))
    assert refused(device, registry, replace(entry, digest=digest, envelope=of_envelope)) == BundleError.code


def test_a_device_whose_runtime_bootstrap_did_not_install_refuses_a_runtime(
    device: Device, registry: HostileRegistry, release: RuntimeRelease
) -> None:
    registry.put_channel(device.key, 1, registry.put_runtime(release, BYTES, device.key))
    assert "edgert bootstrap did not install" in followed(following(device, registry.address))[0]

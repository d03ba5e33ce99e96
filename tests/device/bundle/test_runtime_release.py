"""The signed list of a runtime's wheels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgert.bundle.runtime_release import RuntimeRelease, RuntimeTarget, Wheel, read_runtime, sign_runtime
from edgert.bundle.signing import new_key
from edgert.errors import BundleError, NotCompatible

WHEEL = Wheel("edgert-0.1.0-py3-none-any.whl", 10, 40, "0" * 64)
SMALL = RuntimeTarget("1" * 16, "3.11", "aarch64", "2.28", ("tflite",), (), (WHEEL,))
LARGE = replace(SMALL, id="2" * 16, engines=("tflite", "onnxruntime"), extras=("text",))
RELEASE = RuntimeRelease(3, "0.1.0", (SMALL, LARGE))
NONE = frozenset[str]()


def test_a_signed_release_is_read_back_unchanged() -> None:
    key = new_key()
    assert read_runtime(sign_runtime(RELEASE, key), (key.public,)) == (RELEASE, RELEASE.to_bytes())


def test_a_device_gets_the_first_target_with_all_of_its_engines_and_extras() -> None:
    here = ("3.11", "aarch64", "2.36")
    assert RELEASE.target_for(*here, frozenset({"tflite"}), NONE) == SMALL
    assert RELEASE.target_for(*here, frozenset({"onnxruntime"}), NONE) == LARGE
    assert RELEASE.target_for(*here, NONE, frozenset({"text"})) == LARGE
    with pytest.raises(NotCompatible, match="publish a runtime for this device"):
        RELEASE.target_for(*here, frozenset({"openvino"}), NONE)
    with pytest.raises(NotCompatible, match=r"this device has Python 3.12 on aarch64, glibc 2.36 and no engine"):
        RELEASE.target_for("3.12", "aarch64", "2.36", NONE, NONE)
    with pytest.raises(NotCompatible):
        RELEASE.target_for("3.11", "aarch64", "2.9", NONE, NONE)


@pytest.mark.parametrize(
    "changes",
    [
        {"release": 0},
        {"edgert": ""},
        {"targets": ()},
        {"targets": (replace(SMALL, wheels=(WHEEL, WHEEL)),)},
        {"targets": (replace(SMALL, engines=()),)},
        {"targets": (replace(SMALL, wheels=(replace(WHEEL, name="edgert.whl"),)),)},
        {"targets": (replace(SMALL, wheels=(replace(WHEEL, sha256="0"),)),)},
    ],
)
def test_a_release_with_a_value_that_is_not_allowed_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BundleError):
        replace(RELEASE, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format": 2}', b'{"format": 1, "release": "x"}', b"[" * 10_000])
def test_bytes_that_are_not_a_release_are_refused(data: bytes) -> None:
    with pytest.raises(BundleError):
        RuntimeRelease.from_bytes(data)

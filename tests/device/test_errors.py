"""The error tree: codes are stable and unique, and several devices' errors have one exit code."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edgert.errors import (
    DaemonEnded,
    DaemonUnreachable,
    DeviceUnreachable,
    EdgeRTError,
    Interrupted,
    LoginRefused,
    RolledBack,
    by_code,
    by_wire_code,
    exit_code_of,
)


def classes(cls: type[EdgeRTError] = EdgeRTError) -> list[type[EdgeRTError]]:
    return [cls, *(each for child in cls.__subclasses__() for each in classes(child))]


def test_each_class_is_found_by_its_own_codes() -> None:
    ours = [cls for cls in classes() if cls.__module__ == EdgeRTError.__module__]
    codes = [cls.code for cls in ours]
    wire_codes = [cls.wire_code for cls in ours if "wire_code" in vars(cls)]
    assert len(codes) == len(set(codes)) == len(ours)
    assert len(wire_codes) == len(set(wire_codes))
    assert all(by_code(cls.code) is cls for cls in ours)
    assert all(by_wire_code(cls.wire_code) in cls.__mro__ for cls in ours)


def test_an_unknown_code_gives_the_root_class() -> None:
    assert (by_code("made.up"), by_wire_code(65535)) == (EdgeRTError, EdgeRTError)
    assert by_wire_code(DaemonEnded.wire_code) is DaemonUnreachable


def test_a_class_inherits_the_attributes_that_it_does_not_state() -> None:
    assert (LoginRefused.exit_code, LoginRefused.retryable, DeviceUnreachable.retryable) == (6, False, True)
    with pytest.raises(AssertionError, match="exit"):
        type("Odd", (EdgeRTError,), {}, exit=3)


@pytest.mark.parametrize("cls", classes())
def test_an_error_with_another_message_keeps_its_class_and_fields(cls: type[EdgeRTError]) -> None:
    error = cls("full", retry_after_s=0.25)
    other = error.with_message("the queue is full")
    assert (type(other), other.message, str(other), other.retry_after_s) == (
        cls,
        "the queue is full",
        "the queue is full",
        0.25,
    )
    assert (error.message, str(error)) == ("full", "full")


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([], 0),
        ([None, None], 0),
        ([None, RolledBack("a"), DeviceUnreachable("b")], 9),
        ([RolledBack("a"), Interrupted("b"), None], 130),
    ],
    ids=["no-device", "all-good", "first", "ctrl-c"],
)
def test_the_first_error_decides_the_exit_code_unless_the_user_pressed_ctrl_c(
    errors: Sequence[EdgeRTError | None], code: int
) -> None:
    assert exit_code_of(errors) == code

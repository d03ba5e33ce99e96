"""A HELLO carries the flags that are set, and reads them back."""

from __future__ import annotations

import pytest

from edgert.protocol.hello import NO_FLAGS, HelloFlags, hello_frame
from tests.support.frames import complete


@pytest.mark.parametrize("flags", [NO_FLAGS, HelloFlags(shared=True), HelloFlags(True, True, True)])
def test_the_flags_of_a_hello_are_read_back_unchanged(flags: HelloFlags) -> None:
    frame = complete(hello_frame("digits", flags))
    assert frame is not None
    assert frame.json()["model"] == "digits"
    assert HelloFlags.from_json(frame.json()) == flags


@pytest.mark.parametrize("value", [1, "true", None, [], {}])
def test_a_flag_that_is_not_true_is_not_set(value: object) -> None:
    assert HelloFlags.from_json({"shared": value, "unknown": True}) == NO_FLAGS

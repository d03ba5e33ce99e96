"""The entries of a model in a channel after a release is added, halted, or offered to more devices."""

from __future__ import annotations

import pytest

from edgert.bundle.channel import Entry
from edgert.errors import ConfigInvalid
from edgert_deploy.rollout.channel_entries import Entries, newest_of, with_halt, with_release, without_model


def entry(release: int, share: float = 1.0, *sites: str, model: str = "digits", halted: bool = False) -> Entry:
    digest = f"{release:064x}"
    return Entry(model, release, digest, digest, digest, share, sites, halted=halted)


OTHER = entry(3, model="echo")


@pytest.mark.parametrize(
    ("before", "new", "after"),
    [
        ((), entry(1), (entry(1),)),
        ((entry(1),), entry(2, 0.05), (entry(2, 0.05), entry(1))),  # the other devices keep the old release
        ((entry(2, 0.05), entry(1)), entry(2, 0.5), (entry(2, 0.5), entry(1))),
        ((entry(2, 0.5), entry(1)), entry(2), (entry(2),)),
        ((entry(2, 0.5), entry(1)), entry(3, 0.05), (entry(3, 0.05), entry(1))),  # replaced before all devices had it
        ((entry(2, 0.5, halted=True), entry(1)), entry(3, 0.05), (entry(3, 0.05), entry(1))),
        ((entry(2, halted=True),), entry(3, 0.05), (entry(3, 0.05),)),
        ((entry(1),), entry(2, 1.0, "plant-a"), (entry(2, 1.0, "plant-a"), entry(1))),
        ((entry(2, 1.0, "plant-a"), entry(1)), entry(3, 0.5), (entry(3, 0.5), entry(2, 1.0, "plant-a"), entry(1))),
        ((entry(2, 1.0, "plant-a"), entry(1)), entry(3), (entry(3),)),
    ],
)
def test_a_release_replaces_the_entries_that_it_supersedes(before: Entries, new: Entry, after: Entries) -> None:
    assert with_release((*before, OTHER), new) == (*after, OTHER)


def test_a_lower_release_is_refused_because_devices_would_refuse_it() -> None:
    with pytest.raises(ConfigInvalid, match="refuse the older release 1"):
        with_release((entry(2),), entry(1))
    assert with_release((entry(2, 1.0, "plant-a"),), entry(1))[0].release == 1  # the other devices may lack the release


def test_only_the_newest_release_is_halted() -> None:
    before = (entry(2, 0.05), entry(1), OTHER)
    assert with_halt(before, "digits", True) == (entry(2, 0.05, halted=True), entry(1), OTHER)
    every = with_halt(before, "", True)
    assert [one.halted for one in every] == [True, False, True]
    assert with_halt(every, "", False) == before


def test_a_release_with_several_entries_is_halted_in_each_of_them() -> None:
    before = (entry(2, 1.0, "plant-b"), entry(2, 1.0, "plant-a"), entry(1))
    halted = with_halt(before, "digits", True)
    assert [one.halted for one in halted] == [True, True, False]
    again = with_halt(halted, "digits", False, retry=True)
    assert [(one.halted, one.attempt) for one in again] == [(False, 2), (False, 2), (False, 1)]


def test_a_release_is_tried_once_more_only_on_request() -> None:
    again = with_halt((entry(2, 0.05, halted=True), entry(1)), "digits", False, retry=True)
    assert [one.attempt for one in again] == [2, 1]
    assert with_release(again, entry(2, 0.5))[0].attempt == 2  # an offer to more devices is not a new attempt
    assert with_release(again, entry(3))[0].attempt == 1


def test_the_error_names_a_model_that_the_channel_lacks() -> None:
    with pytest.raises(ConfigInvalid, match="no model 'digits'; known models: echo"):
        with_halt((OTHER,), "digits", True)
    with pytest.raises(ConfigInvalid, match="no model 'digits'; known models: echo"):
        without_model((OTHER,), "digits")
    with pytest.raises(ConfigInvalid, match="channel canary has no model 'digits'; known models: none"):
        newest_of((), "digits", "canary")


def test_a_model_leaves_the_channel_with_all_its_releases() -> None:
    assert without_model((entry(2, 0.05), entry(1), OTHER), "digits") == (OTHER,)

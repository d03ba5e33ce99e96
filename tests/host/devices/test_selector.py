"""Selectors select devices. A word that matches no device is refused, and the message lists valid words."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert.errors import ConfigInvalid
from edgert_deploy.devices.inventory import (
    Device,
)
from edgert_deploy.devices.selector import select

DEVICES = [
    Device(
        "kitchen",
        "local",
        "/srv/k",
        "raspberry-pi-4",
        "/srv/k",
        groups=("canary", "line-2"),
        tags=("rack=3", "outdoors"),
    ),
    Device("here", "local", "/srv/here", "this-machine", "/srv/here", site="plant-1"),
]
PATH = Path("inventory.toml")


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("all", ["kitchen", "here"]),
        ("here", ["here"]),
        ("canary", ["kitchen"]),
        ("here, canary,kitchen", ["kitchen", "here"]),
        ("tag:rack", ["kitchen"]),
        ("tag:rack=3", ["kitchen"]),
        ("tag:outdoors,here", ["kitchen", "here"]),
        ("site:plant-1", ["here"]),
        ("profile:raspberry-pi-4", ["kitchen"]),
        ("all,!tag:rack", ["here"]),
        ("!here", ["kitchen"]),
    ],
)
def test_selectors_are_names_or_groups_or_tags_or_sites_or_profiles_or_all(selector: str, names: list[str]) -> None:
    assert [d.name for d in select(DEVICES, selector, PATH)] == names


@pytest.mark.parametrize(
    "selector",
    ["nobody", "kitchen,nobody", "", ",", "tag:rack=4", "tag:", "site:x", "colour:red", "!nobody", "all,!all"],
)
def test_an_empty_or_invalid_selector_is_refused(selector: str) -> None:
    with pytest.raises(ConfigInvalid):
        select(DEVICES, selector, PATH)


def test_the_error_about_an_unknown_selector_lists_the_existing_values() -> None:
    with pytest.raises(ConfigInvalid, match="no device with 'tag:rack=4'; known tags: outdoors, rack=3"):
        select(DEVICES, "tag:rack=4", PATH)


@pytest.mark.parametrize(
    ("selector", "reason"),
    [
        ("rack", "no device or group 'rack'; known devices: kitchen, here; known groups: canary, line-2"),
        ("site:x", "no device with 'site:x'; known sites: default, plant-1"),
        ("colour:red", "known prefixes: tag:, site:, profile:"),
    ],
)
def test_a_selector_without_a_match_is_refused_with_the_existing_values(selector: str, reason: str) -> None:
    with pytest.raises(ConfigInvalid, match=reason):
        select(DEVICES, selector, PATH)


def test_a_group_is_not_accepted_as_the_name_of_one_device() -> None:
    assert select(DEVICES, "here", PATH, groups=False) == [DEVICES[1]]
    with pytest.raises(ConfigInvalid, match="no device 'canary'"):
        select(DEVICES, "canary", PATH, groups=False)


def test_an_inventory_without_devices_names_the_command_that_adds_one() -> None:
    with pytest.raises(ConfigInvalid, match="add one with edgert device add"):
        select([], "all", PATH)

"""Selectors: the text with which a command selects devices of the inventory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgert.errors import ConfigInvalid
from edgert.printable import some_of

if TYPE_CHECKING:
    from edgert_deploy.devices.inventory import Device

ALL = "all"
SELECTED_BY = ("tag:", "site:", "profile:", "!")
KNOWN_SHOWN_MAX = 20


def select(devices: list[Device], selector: str, path: Path, *, groups: bool = True) -> list[Device]:
    """Return the devices that `selector` matches: each device once, in the order of the inventory.

    A selector is a list of words, separated by commas: names, groups, `all`, `tag:KEY`, `tag:KEY=VALUE`, `site:NAME`,
    `profile:NAME`. `!` before a word excludes the devices of the word. If every word has `!`, the selection starts from
    all devices. Raises ConfigInvalid if a word matches no device, because a typing mistake must not select other
    devices.
    """
    words = [word.strip() for word in selector.split(",") if word.strip()]
    if words and not devices:
        raise ConfigInvalid(f"{path} has no device yet: add one with edgert device add")
    included = [word for word in words if not word.startswith("!")]
    chosen = {d.name for d in devices} if words and not included else set[str]()
    for word in included:
        chosen |= _matched(devices, word, path, groups)
    for word in words:
        if word.startswith("!"):
            chosen -= _matched(devices, word[1:], path, groups)
    if not chosen:
        raise ConfigInvalid(f"{selector!r} selects no device: give names, groups, tag:KEY, site:NAME or {ALL}")
    return [d for d in devices if d.name in chosen]


def _matched(devices: list[Device], word: str, path: Path, groups: bool) -> set[str]:
    names = {d.name for d in devices if (_matches(d, word) if groups else d.name == word)}
    if not names:
        raise ConfigInvalid(f"{path} has no {_kind_of(word, groups)}; known {_suggestions(devices, word)}")
    return names


def _matches(device: Device, word: str) -> bool:
    kind, colon, value = word.partition(":")
    if not colon:
        return word in (ALL, device.name, *device.groups)
    if kind == "tag":
        return value in device.tags or any(tag.partition("=")[0] == value for tag in device.tags)
    return value == {"site": device.site, "profile": device.profile}.get(kind)


def _kind_of(word: str, groups: bool) -> str:
    if not groups:
        return f"device {word!r}"
    return f"device with {word!r}" if ":" in word else f"device or group {word!r}"


def _suggestions(devices: list[Device], word: str) -> str:
    """List some valid words of the same kind as `word`."""
    kind = word.partition(":")[0] if ":" in word else ""
    if kind == "tag":
        return f"tags: {some_of(sorted({tag for d in devices for tag in d.tags}), KNOWN_SHOWN_MAX)}"
    if kind in ("site", "profile"):
        return f"{kind}s: {some_of(sorted({getattr(d, kind) for d in devices}), KNOWN_SHOWN_MAX)}"
    if kind:
        return "prefixes: tag:, site:, profile:"
    groups = sorted({group for d in devices for group in d.groups})
    names = some_of([d.name for d in devices], KNOWN_SHOWN_MAX)
    return f"devices: {names}" + (f"; known groups: {some_of(groups, KNOWN_SHOWN_MAX)}" if groups else "")

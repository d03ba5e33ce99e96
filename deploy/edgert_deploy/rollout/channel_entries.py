"""The entries of a channel's next statement: add a release, raise its share, halt it. Pure.

For each model, a channel lists releases with a limited audience first and the release for every device last: a device
takes the first entry that selects it (edgert.bundle.channel).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgert.bundle.channel import Entry
from edgert.errors import ConfigInvalid

Entries = tuple[Entry, ...]


def with_release(entries: Entries, new: Entry) -> Entries:
    """Return the entries with `new` before the others of its model.

    An entry for every device replaces all others of its model. An entry with a share of 100% replaces all with the same
    selectors. An entry with a smaller share replaces those with the same selectors that are halted, have a share below
    100%, or hold the same release. Raises ConfigInvalid for a release below the newest with the same selectors.
    """
    others = [entry for entry in entries if entry.model != new.model]
    same = [entry.attempt for entry in entries if (entry.model, entry.release) == (new.model, new.release)]
    new = replace(
        new, attempt=max(same, default=1)
    )  # a device that rolled it back does not try it again because of this
    ours = [entry for entry in entries if entry.model == new.model]
    newest = max((entry.release for entry in ours if _selectors(entry) == _selectors(new)), default=0)
    if new.release < newest:
        raise ConfigInvalid(
            f"the channel has release {newest} of {new.model}, and devices refuse the older release {new.release}: "
            "publish the older model as a new release (edgert build)"
        )
    return (new, *(entry for entry in ours if not _supersedes(new, entry)), *others)


def with_halt(entries: Entries, model: str, halted: bool, *, retry: bool = False) -> Entries:
    """Return the entries with the newest release of `model` ("": of every model) halted or not.

    With `retry`, devices that rolled it back try it once more. Raises ConfigInvalid.
    """
    newest = [entry for entry in _first_of_each(entries) if model in ("", entry.model)]
    if not newest:
        raise ConfigInvalid(f"the channel has no model {model}: it has {_models(entries)}")
    return tuple(
        replace(entry, halted=halted, attempt=entry.attempt + retry) if entry in newest else entry for entry in entries
    )


def without_model(entries: Entries, model: str) -> Entries:
    """Return the entries without those of `model`. Raises ConfigInvalid if there are none."""
    kept = tuple(entry for entry in entries if entry.model != model)
    if len(kept) == len(entries):
        raise ConfigInvalid(f"the channel has no model {model}: it has {_models(entries)}")
    return kept


def newest_of(entries: Entries, model: str, channel: str) -> Entry:
    """Return the entry of the newest release of `model`. Raises ConfigInvalid if there is none."""
    newest = next((entry for entry in entries if entry.model == model), None)
    if newest is None:
        raise ConfigInvalid(f"channel {channel} has no model {model}: it has {_models(entries)}")
    return newest


def _first_of_each(entries: Entries) -> list[Entry]:
    return list({entry.model: entry for entry in reversed(entries)}.values())


def _supersedes(new: Entry, old: Entry) -> bool:
    whole = new.share >= 1
    if whole and not any(_selectors(new)):
        return True
    same = _selectors(new) == _selectors(old)
    return same and (whole or old.halted or old.share < 1 or old.release == new.release)


def _selectors(entry: Entry) -> tuple[Sequence[str], ...]:
    return entry.sites, entry.profiles, entry.tags


def _models(entries: Entries) -> str:
    return ", ".join(sorted({entry.model for entry in entries})) or "none"

"""Changes the entries of a channel: adds a release, raises its share, halts it.

This module does no I/O. For each model, a channel lists releases for some devices first, and the release for every
device last. A device uses the first entry that selects it (edgert.bundle.channel).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgert.bundle.channel import Entry
from edgert.errors import ConfigInvalid

Entries = tuple[Entry, ...]


def with_release(entries: Entries, new: Entry) -> Entries:
    """Return the entries with `new` before the other entries of its model.

    `new` replaces some of these entries:

    - If `new` is for every device, it replaces all of these entries.
    - If `new` has selectors and a share of 100%, it replaces the entries with the same selectors.
    - If the share of `new` is smaller, it replaces those entries with the same selectors that are halted, have a share
      below 100%, or have the same release.

    Raises ConfigInvalid if the release is older than the newest release with the same selectors.
    """
    others = [entry for entry in entries if entry.model != new.model]
    same = [entry.attempt for entry in entries if (entry.model, entry.release) == (new.model, new.release)]
    # `new` has the attempt of the older entries, so a device that rolled this release back does not try it again.
    new = replace(new, attempt=max(same, default=1))
    ours = [entry for entry in entries if entry.model == new.model]
    newest = max((entry.release for entry in ours if _selectors(entry) == _selectors(new)), default=0)
    if new.release < newest:
        raise ConfigInvalid(
            f"the channel has release {newest} of {new.model}, and devices refuse the older release {new.release}: "
            "publish the older model as a new release (edgert build)"
        )
    return (new, *(entry for entry in ours if not _supersedes(new, entry)), *others)


def with_halt(entries: Entries, model: str, halted: bool, *, retry: bool = False) -> Entries:
    """Halt the newest release of `model`, or if `halted` is False, end its halt. Return the new entries.

    The release may have several entries, such as one for each site. `model` "" means every model. With `retry`,
    devices that rolled the release back try it once more. Raises ConfigInvalid for an unknown model.
    """
    newest = {name: number for name, number in newest_releases(entries).items() if model in ("", name)}
    if not newest:
        raise ConfigInvalid(f"the channel has no model {model!r}; known models: {_models(entries)}")
    return tuple(
        replace(entry, halted=halted, attempt=entry.attempt + retry)
        if entry.release == newest.get(entry.model)
        else entry
        for entry in entries
    )


def without_model(entries: Entries, model: str) -> Entries:
    """Return the entries of the other models. Raises ConfigInvalid if `model` has no entry."""
    kept = tuple(entry for entry in entries if entry.model != model)
    if len(kept) == len(entries):
        raise ConfigInvalid(f"the channel has no model {model!r}; known models: {_models(entries)}")
    return kept


def newest_releases(entries: Entries) -> dict[str, int]:
    """Return the number of each model's newest release."""
    return {entry.model: entry.release for entry in reversed(entries)}


def newest_of(entries: Entries, model: str, channel: str) -> Entry:
    """Return the entry of the newest release of `model`. Raises ConfigInvalid if `model` has no entry."""
    newest = next((entry for entry in entries if entry.model == model), None)
    if newest is None:
        raise ConfigInvalid(f"channel {channel} has no model {model!r}; known models: {_models(entries)}")
    return newest


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

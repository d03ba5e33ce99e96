"""Compares two bundles: their differences, and the files that a device with the old bundle lacks.

The manifests are compared field by field as JSON, so that fields of later versions are compared too. Entries of lists
are matched by their name: an artifact's id, a target's profile, a file's path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgert.bundle.bundle_file import Bundle
from edgert.bundle.delta import PATCH_BYTES_MAX
from edgert.bundle.manifest import Manifest, TargetEntry
from edgert_deploy.common.temporary_folder import temporary_folder
from edgert_deploy.packager.receipt import read_receipt
from edgert_deploy.rollout.delta import lacking, predecessors, smallest_form

# The fields that may name an entry in a list of objects.
NAMED_BY = ("id", "profile", "path", "name")


@dataclass(frozen=True)
class Change:
    """A changed field, such as `artifacts.tflite-int8.precision`. The value of an absent field is None."""

    field: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Fetch:
    """The files that a device with the old release fetches for the new release.

    `edgert deploy` sends `compressed_bytes` of patches for them. All files of the target have `whole_bytes`.
    """

    target: str
    files: int
    size_bytes: int
    compressed_bytes: int
    whole_bytes: int


@dataclass(frozen=True)
class Comparison:
    """The changes of manifest and receipt, and the files to fetch. `receipts` is empty if one is missing."""

    changes: tuple[Change, ...]
    fetches: tuple[Fetch, ...]
    receipts: tuple[Change, ...] = ()


def compare(before: Bundle, after: Bundle) -> Comparison:
    """Compare two open bundles. Raises BundleCorrupt for a file that differs from the signed file."""
    changes = tuple(_changes("", _by_name(_value(before.manifest)), _by_name(_value(after.manifest))))
    with temporary_folder("diff") as folder:
        old, new = folder / "before", folder / "after"
        for bundle, unpacked in ((before, old), (after, new)):
            unpacked.mkdir()
            bundle.unpack(unpacked, frozenset(entry.path for entry in bundle.manifest.files))
        fetches = tuple(fetch(before.manifest, after.manifest, target, old, new) for target in after.manifest.targets)
    one, other = read_receipt(before), read_receipt(after)
    receipts = () if one is None or other is None else tuple(_changes("", _by_name(one), _by_name(other)))
    return Comparison(changes, fetches, receipts)


def fetch(before: Manifest, after: Manifest, target: TargetEntry, old: Path, new: Path) -> Fetch:
    """Return the files that a device fetches.

    Args:
        before: The manifest that the device has.
        after: The manifest that the device gets.
        target: The entry of the device's profile in `after`.
        old: The folder of the unpacked old bundle.
        new: The folder of the unpacked new bundle.
    """
    was = next((t for t in before.targets if t.profile == target.profile), None)
    has = {entry.sha256: entry for entry in before.files_for(was)} if was is not None else {}
    lacks = lacking(after, target, has)
    with temporary_folder("diff") as folder:
        sent = 0
        for entry in lacks:
            bases = predecessors(entry, [(each.path, each.sha256) for each in has.values()])
            base = has[bases[0]] if bases else None
            content = None
            if base is not None and 0 < base.size_bytes <= PATCH_BYTES_MAX and 0 < entry.size_bytes <= PATCH_BYTES_MAX:
                content = (base.sha256, (old / base.path).read_bytes())
            sent += smallest_form(entry, new / entry.path, content, True, folder / "part")[0].size_bytes
    return Fetch(
        target=target.profile,
        files=len(lacks),
        size_bytes=sum(entry.size_bytes for entry in lacks),
        compressed_bytes=sent,
        whole_bytes=sum(entry.size_bytes for entry in lacking(after, target, ())),
    )


def _value(manifest: Manifest) -> dict[str, Any]:
    return dict(json.loads(manifest.to_bytes()))


def _by_name(value: Any) -> Any:
    """Return `value` with each list of named objects changed to {name: object}."""
    if isinstance(value, dict):
        return {key: _by_name(inner) for key, inner in value.items()}
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        by = next((name for name in NAMED_BY if all(name in entry for entry in value)), None)
        if by is not None:
            return {entry[by]: _by_name({k: v for k, v in entry.items() if k != by}) for entry in value}
    return value


def _changes(field: str, before: Any, after: Any) -> Iterator[Change]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            yield from _changes(f"{field}.{key}" if field else key, before.get(key), after.get(key))
    elif before != after:
        yield Change(field, before, after)

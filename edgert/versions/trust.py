"""The keys that this device trusts: the keys in its key folder, except keys that a channel revoked.

STATE/revoked_keys.json    the ids of revoked keys; a bootstrap does not make such a key trusted again
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from edgert.bundle.signing import Keyring, read_keyring
from edgert.durable import store_file
from edgert.errors import StorageFailed
from edgert.state_dir import StateDir

KEYS_MAX = 1024


def trusted_keys(state: StateDir) -> Keyring:
    """Return the trusted keys of the device. The keyring lists revoked keys as damaged, with the reason."""
    ring, revoked = read_keyring(state.keys), revoked_keys(state)
    revoked_files = {
        path: f"key {key.key_id} in {path} was revoked by a channel"
        for path, key in ring.keys.items()
        if key.key_id in revoked
    }
    return Keyring(
        {path: key for path, key in ring.keys.items() if path not in revoked_files}, {**ring.damaged, **revoked_files}
    )


def revoked_keys(state: StateDir) -> frozenset[str]:
    """Return the ids of the keys that channels revoked."""
    try:
        return frozenset(str(each) for each in json.loads(state.revoked_keys.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return frozenset()


def revoke(state: StateDir, key_ids: Iterable[str]) -> None:
    """Revoke these keys durably. Raises StorageFailed."""
    before = revoked_keys(state)
    after = before.union(key_ids)
    if after == before:
        return
    if len(after) > KEYS_MAX:
        raise StorageFailed(f"channels revoked more than {KEYS_MAX} keys, the limit: bootstrap this device again")
    store_file(state.revoked_keys, json.dumps(sorted(after)).encode())

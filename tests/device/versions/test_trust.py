"""The keys that a device trusts: a revoked key stays revoked."""

from __future__ import annotations

from pathlib import Path

from edgert.bundle.signing import new_key
from edgert.state_dir import StateDir
from edgert.versions.trust import revoke, revoked_keys, trusted_keys


def test_a_revoked_key_is_not_trusted_although_its_file_is_installed_again(tmp_path: Path) -> None:
    state, (good, stolen) = StateDir(tmp_path), (new_key().public, new_key().public)
    state.keys.mkdir()
    for key in (good, stolen):
        (state.keys / f"{key.key_id}.pem").write_bytes(key.pem())
    assert len(trusted_keys(state).trusted) == 2
    revoke(state, [stolen.key_id])
    revoke(state, [])
    (state.keys / "again.pem").write_bytes(stolen.pem())
    ring = trusted_keys(state)
    assert [key.key_id for key in ring.trusted] == [good.key_id]
    assert [stolen.key_id in line and "revoked" in line for line in ring.warnings] == [True, True]


def test_a_damaged_list_revokes_nothing(tmp_path: Path) -> None:
    (tmp_path / "revoked_keys.json").write_text("{")
    assert revoked_keys(StateDir(tmp_path)) == frozenset()

"""`edgertd install` of a bundle that its user may not read. Root acts as the owner of the state folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from edgert.bundle.signing import SigningKey
from edgert.cli import main

UID = 54_321  # a user without an account


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_bundle_that_the_owner_of_the_state_folder_may_not_read_names_the_user_and_a_command(
    signing_key: SigningKey, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:  # other users cannot enter `tmp_path`
        root = Path(folder)
        state, private, bundle = root / "state", root / "private", root / "my digits.edgert"
        (state / "keys").mkdir(parents=True)
        (state / "keys" / "test.pem").write_bytes(signing_key.public.pem())
        (state / "config.toml").write_text('device = "d"\nprofile = "p"\n')
        private.mkdir(mode=0o700)
        for path in (bundle, private / "digits.edgert"):
            path.touch(mode=0o600)
        root.chmod(0o755)
        paths = (root / "missing.edgert", bundle, private / "digits.edgert")
        codes = [main(["--state", str(state), "install", str(paths[0])])]  # imports what that user may not read
        os.setresuid(UID, UID, 0)
        try:
            codes += [main(["--state", str(state), "install", str(path)]) for path in paths[1:]]
        finally:
            os.setresuid(0, 0, 0)
    assert codes == [5, 5, 5]
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"error: cannot open bundle {bundle}: user {UID} may not read it; allow it: chmod o+r '{bundle}'",
        f"error: cannot open bundle {private}/digits.edgert: user {UID} may not enter {private}; move the bundle to a folder "
        f"that this user may enter: mv {private}/digits.edgert /var/tmp/",
    ]

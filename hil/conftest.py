"""What tests on virtual devices share."""

from __future__ import annotations

import os

import pytest

from edgert.errors import ConfigInvalid
from hil.containers import running_container, why_not


@pytest.fixture(scope="session")
def containers_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips, with the reason, where no container comes up here; with $EDGERT_HIL_REQUIRED set that is a failure.

    Only starting one shows it: a mirror out of reach, a folder that takes no overlay, a root without rights.
    """
    reason = why_not()
    if not reason:
        try:
            with running_container(tmp_path_factory.mktemp("probe")):
                return
        except ConfigInvalid as error:
            reason = error.message
    if os.environ.get("EDGERT_HIL_REQUIRED"):
        pytest.fail(f"no container runs here: {reason}")
    pytest.skip(f"no container runs here: {reason}")

"""Fixtures that the tests on virtual devices share."""

from __future__ import annotations

import os

import pytest

from edgert.errors import ConfigInvalid
from hil.support.containers import running_container, why_not


@pytest.fixture(scope="session")
def containers_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip, with the reason, if no container starts here; fail instead if $EDGERT_HIL_REQUIRED is set.

    Only a start shows whether containers can run: the mirror may be unreachable, the file system may support no
    overlay, or root may lack rights.
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

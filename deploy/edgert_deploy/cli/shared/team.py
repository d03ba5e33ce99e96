"""The project's rollouts as commands use them: with the team's store, if `edgert.toml` names one."""

from __future__ import annotations

from edgert.cli.output import progress
from edgert.errors import EdgeRTError
from edgert_deploy.common.project import find_project
from edgert_deploy.rollout.rollout_store import RolloutStore


def open_rollouts(*, changes: bool = False) -> RolloutStore:
    """Return the project's rollouts, up to date with the team's store.

    If the team's store cannot be reached, a command that `changes` a rollout ends with the error. Other commands print
    a note and continue with this host's copy.
    """
    project = find_project()
    if project.store:
        from edgert_deploy.fleet.store.rollouts import StoredRollouts

        try:
            store = RolloutStore(project.rollouts, StoredRollouts(project.store), _note)
            store.sync()
            return store
        except EdgeRTError as error:
            if changes:
                raise
            _note(f"{error.message}. The output shows only this host's copy")
    return RolloutStore(project.rollouts, None, _note)


def _note(line: str) -> None:
    progress(f"note: {line}")

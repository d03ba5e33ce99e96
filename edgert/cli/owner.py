"""Root's commands act as the user whom the state folder belongs to.

A service runs as a user of its own, and what a command leaves in the state folder must be that user's to change.
It also means that root never writes where a less trusted user could have laid a link.
"""

from __future__ import annotations

import os
import pwd

from edgert.config import StateDir
from edgert.errors import DeviceError


def act_as_owner(state: StateDir) -> None:
    """Become the owner of the state folder, where root gives the command and it is somebody else's."""
    if os.geteuid() != 0:
        return
    try:
        uid = state.root.stat().st_uid
    except OSError:
        return  # the command itself says that it is missing
    if uid == 0:
        return
    try:
        user = pwd.getpwuid(uid)
        os.initgroups(user.pw_name, user.pw_gid)
        os.setgid(user.pw_gid)
        os.setuid(uid)
    except (KeyError, OSError) as error:
        raise DeviceError(f"{state.root} belongs to user {uid}, as whom nothing can be run: {error}") from error
    os.environ.update(HOME=user.pw_dir, USER=user.pw_name, LOGNAME=user.pw_name)
    try:
        os.stat(".")
    except OSError:  # root's own folder, say, closed to the owner: OpenVINO looks about where it stands, and dies of it
        os.chdir("/")

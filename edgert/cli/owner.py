"""Commands of root act as the owner of the state folder, or of the folder of keys.

The daemon may run as another user, and must be able to change the files that a command writes. A command that acts as
the owner also cannot write to a file of root through a link that the owner has made.
"""

from __future__ import annotations

import os
import pwd

from edgert.errors import DeviceError
from edgert.state_dir import StateDir


def act_as_owner(state: StateDir, *, of_keys: bool = False) -> None:
    """If root runs the command, become the owner of the state folder (or of the folder of keys)."""
    if os.geteuid() != 0:
        return
    folder = state.keys if of_keys else state.root
    try:
        uid = folder.stat(follow_symlinks=not of_keys).st_uid
    except OSError:
        return  # the command itself reports that the folder is missing
    if uid == 0:
        return
    try:
        user = pwd.getpwuid(uid)
        os.initgroups(user.pw_name, user.pw_gid)
        os.setgid(user.pw_gid)
        os.setuid(uid)
    except (KeyError, OSError) as error:
        raise DeviceError(
            f"{folder} belongs to user {uid}, and this command cannot run as that user: {error}. Run it as that user, or "
            "let an existing user own the folder (chown)"
        ) from error
    os.environ.update(HOME=user.pw_dir, USER=user.pw_name, LOGNAME=user.pw_name)
    try:
        os.stat(".")
    except OSError:  # the owner cannot read this folder, for example root's home; OpenVINO crashes in such a folder
        os.chdir("/")

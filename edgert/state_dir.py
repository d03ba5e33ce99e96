"""The paths in a device's state folder, and the default places of that folder and of the apps' socket.

STATE/config.toml            the device's name, profile and broker (edgert.config)
STATE/keys/*.pem             public keys of trusted signers of bundles
STATE/revoked_keys.json      keys that are no longer trusted (edgert.versions.trust)
STATE/latest_time.json       the latest time that is certain (edgert.versions.latest_time)
STATE/latest_time.lock       locked while latest_time.json changes
STATE/claims/                deployments in progress (edgert.versions.claims)
STATE/models/<model>/        slots (edgert.versions.slot_store)
STATE/incoming/              bundles and deltas that are being received
STATE/cache/                 files that engines compiled; you may remove them at any time
STATE/learned/               measurements of loaded models; you may remove them at any time
STATE/follow/                the record of the channel's follower (edgert.follow.record)
STATE/spool/telemetry.db     reports that the broker has not acknowledged
STATE/control.sock           the daemon's socket for commands
STATE/edgertd.log, .pid      log and process id of a daemon that the monitor runs
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from edgert.durable import make_private, only_owner_writes
from edgert.errors import ConfigInvalid
from edgert.machine import in_home

SYSTEM_SOCKET = Path("/run/edgert/edgert.sock")  # the socket of the system's service
ROOTS_STATE, USERS_STATE = Path("/var/lib/edgert"), "~/.local/state/edgert"
# A name in STATE/learned starts with this number of digits of a hash; a name in STATE/cache starts with all digits.
LEARNED_NAME_CHARS = 32
SOCKET_PATH_BYTES_MAX = 107  # sun_path of AF_UNIX on Linux, without its terminating zero


class StateDir:
    """The paths of a device's state folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.toml"
        self.log = root / "edgertd.log"
        self.pid = root / "edgertd.pid"
        self.keys = root / "keys"
        self.models = root / "models"
        self.incoming = root / "incoming"
        self.cache = root / "cache"
        self.learned = root / "learned"
        self.follow = root / "follow"
        self.claims = root / "claims"
        self.spool = root / "spool" / "telemetry.db"
        self.revoked_keys = root / "revoked_keys.json"
        self.latest_time = root / "latest_time.json"

    @property
    def control_socket(self) -> Path:
        return self.find(self.root / "control.sock")

    @property
    def read_only(self) -> bool:
        """Whether the storage is read-only, such as a worn SD card.

        After an error, ext4 refuses every change. Newer kernels do not show this in `statvfs`.
        """
        try:
            os.utime(self.root)
        except OSError as error:
            return error.errno == errno.EROFS
        return False

    def find(self, socket: Path) -> Path:
        """Return the path of `socket`. It is in memory if the storage is read-only."""
        try:
            instead = self.volatile(socket.name)
            return instead if _belongs(instead.parent, self.root) and instead.exists() else socket
        except OSError:  # the path does not exist, or this user has no access to it
            return socket

    def path_for_new(self, name: str) -> Path:
        """Return the path for the daemon's new file `name`. It is in memory if the storage is read-only."""
        instead = self.volatile(name)
        if not self.read_only:
            if _belongs(instead.parent, self.root):
                instead.unlink(missing_ok=True)  # left by a killed daemon that ran on read-only storage
            return self.root / name
        instead.parent.mkdir(exist_ok=True)
        if not _belongs(instead.parent, self.root):
            raise PermissionError(errno.EPERM, "the folder belongs to another user", os.fspath(instead.parent))
        instead.parent.chmod(0o755)  # apps of other users must reach the socket
        return instead

    def volatile(self, name: str) -> Path:
        """Return the path in memory for the file `name` of this state folder, for read-only storage."""
        uid = self.root.stat().st_uid
        run, user = SYSTEM_SOCKET.parent, Path(f"/run/user/{uid}")
        folder = Path(f"/dev/shm/edgert-{uid}")
        if uid == 0 or (run.exists() and run.stat().st_uid == uid):
            folder = run
        elif user.exists():
            folder = user / "edgert"
        return folder / f"{hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]}-{name}"

    def make(self) -> None:
        """Create the folders that a daemon writes into. Other users may not enter them. Raises OSError.

        Other users may enter the state folder itself, because it contains the apps' socket.
        """
        for folder in (self.models, self.incoming, self.cache, self.learned, self.spool.parent):
            make_private(folder)
        for folder in (self.root, self.keys):
            with suppress(FileNotFoundError):
                only_owner_writes(folder)

    def socket(self, configured: str) -> Path:
        """Return the path of the apps' socket: the `configured` path, else `STATE/edgert.sock`."""
        path = Path(configured) if configured else self.find(self.root / "edgert.sock")
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigInvalid(
                f"socket path {path} is longer than {SOCKET_PATH_BYTES_MAX} bytes: set a shorter `socket` in {self.config}"
            )
        return path

    def model_names(self) -> list[str]:
        """Return the names of all models that were ever installed here, sorted."""
        try:
            return sorted(entry.name for entry in self.models.iterdir() if (entry / "state.json").exists())
        except FileNotFoundError:
            return []


def _belongs(folder: Path, root: Path) -> bool:
    """Return whether `folder` exists and only the owner of `root` can write there."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == root.stat().st_uid and not status.st_mode & 0o022


def default_state_dir() -> Path:
    """Return $EDGERT_STATE, else /var/lib/edgert for root, else ~/.local/state/edgert.

    Raises ConfigInvalid for a user without a home.
    """
    if folder := os.environ.get("EDGERT_STATE"):
        return Path(folder)
    if os.geteuid() == 0:
        return ROOTS_STATE
    return in_home(USERS_STATE, "Pass --state, or set HOME")


def default_socket() -> Path:
    """Return $EDGERT_SOCKET, else the first existing socket of a daemon of this machine or this user."""
    if path := os.environ.get("EDGERT_SOCKET"):
        return Path(path)
    states = [ROOTS_STATE, Path(os.path.expanduser(USERS_STATE))]  # without a home, a path that does not exist
    places = [SYSTEM_SOCKET, *(StateDir(root).find(root / "edgert.sock") for root in states)]
    if state := os.environ.get("EDGERT_STATE"):
        places.insert(0, StateDir(Path(state)).find(Path(state) / "edgert.sock"))
    for place in places:
        with suppress(OSError):  # this user may not read the folder
            if place.exists():
                return place
    return places[0]

"""A real PostgreSQL for tests: its own server on a free loopback port, in a temporary folder.

initdb and postgres refuse root, so as root they run as `postgres`, else `nobody`.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tests.support.devices import WAIT_S_MAX, wait_until
from tests.support.servers.ports import free_port


def postgres_folder() -> Path | None:
    """Return the folder of initdb and postgres, or None if PostgreSQL is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found += [Path(path).resolve().parent for path in (shutil.which("postgres"),) if path]
    needed = ("initdb", "postgres", "pg_isready")
    return next((folder for folder in found if all((folder / name).exists() for name in needed)), None)


@contextmanager
def postgres() -> Iterator[str]:
    """Run a server and yield the URL of an empty database; stop it by its pid and remove its folder."""
    binaries = postgres_folder()
    assert binaries is not None
    folder = Path(tempfile.mkdtemp(prefix="edgert-pg-"))
    port, data = free_port(), folder / "data"
    user = _unprivileged()
    if user:
        os.chown(folder, *user)
    try:
        _run([binaries / "initdb", "-D", data, "-U", "ops", "-A", "trust", "--no-sync", "-E", "UTF8"], user)
        with open(folder / "log", "wb") as log:
            words = [binaries / "postgres", "-D", data, "-p", str(port), "-c", "fsync=off", "-k", folder]
            server = subprocess.Popen(
                [*map(str, words), "-c", "listen_addresses=127.0.0.1"],
                stdout=log, stderr=log, cwd=folder, **_as(user),
            )  # fmt: skip
        try:
            ready = [str(binaries / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
            wait_until(lambda: subprocess.run(ready).returncode == 0, f"PostgreSQL answers on {port}")
            yield f"postgresql://ops@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)  # fast shutdown
            server.wait(WAIT_S_MAX)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_database(server: str) -> str:
    """Return the URL of a new database on `server`, a URL of `postgres`."""
    engine = sa.create_engine(server.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    name = f"t{secrets.token_hex(5)}"
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    engine.dispose()
    return server.replace("/postgres", f"/{name}")


def _run(words: Sequence[object], user: tuple[int, int] | None) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd="/", **_as(user))
    assert done.returncode == 0, done.stdout + done.stderr


def _as(user: tuple[int, int] | None) -> dict[str, Any]:
    return {"user": user[0], "group": user[1], "extra_groups": []} if user else {}


def _unprivileged() -> tuple[int, int] | None:
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return entry.pw_uid, entry.pw_gid
    raise AssertionError("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")

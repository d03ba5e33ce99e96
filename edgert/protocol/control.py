"""The protocol of the control socket for `edgertd`: each request and each answer is a JSON line."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from edgert.errors import DaemonBusy, DaemonEnded, DaemonUnreachable, DeviceError, EdgeRTError, ProtocolError, by_code

LINE_BYTES_MAX = 256 * 1024  # of a request
ANSWER_BYTES_MAX = 16 * 1024**2  # the status of a model has 2 to 22 KB
ASK_S_MAX = 5.0
SYNC_S_MAX = 240.0  # the time-out of "sync", longer than the limit of a worker's load


def ask(path: Path, request: dict[str, Any], timeout_s: float = ASK_S_MAX) -> dict[str, Any]:
    """Send one request to the daemon whose control socket is `path`.

    Raises DaemonUnreachable if no daemon listens, DaemonEnded if the daemon ends before the answer, and DaemonBusy if
    the daemon does not answer in time. Also raises the daemon's own error.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(os.fspath(path))
            sock.sendall(json.dumps(request).encode() + b"\n")
            with sock.makefile("rb") as lines:
                line = lines.readline(ANSWER_BYTES_MAX)
            if not line:
                raise ConnectionResetError("no answer")
        except TimeoutError as error:
            raise DaemonBusy(
                f"a daemon runs here but did not answer within {timeout_s:.0f} s; check its log"
            ) from error
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise DaemonUnreachable(f"no daemon listens at {path}: start it with edgertd start") from error
        except PermissionError as error:
            raise DeviceError(f"no permission for {path}: run this as the daemon's user, or as root") from error
        except ConnectionError as error:
            raise DaemonEnded(
                f"the daemon at {path} ended before it answered; check its log, and run this again"
            ) from error
        except OSError as error:
            raise DaemonBusy(f"cannot reach the daemon at {path}: {error.strerror or error}; check its log") from error
    return read_answer(line)


def read_answer(line: bytes) -> dict[str, Any]:
    """Return the value in the daemon's answer. Raises the daemon's error, or ProtocolError for a bad line."""
    try:
        value = json.loads(line)
        if "error" in value:
            raise by_code(str(value["error"]["code"]))(str(value["error"]["message"]))
        return dict(value["ok"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError("the daemon's answer cannot be read; check its log") from error


def answer_of(value: dict[str, Any]) -> dict[str, Any]:
    return {"ok": value}


def error_answer(error: EdgeRTError) -> dict[str, Any]:
    return {"error": error.as_json()}

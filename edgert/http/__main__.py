"""The HTTP process of one daemon: `python -m edgert.http --state DIR`. The supervisor starts it."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from edgert import Client
from edgert.config import read_config
from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.http.address import listening_at, parse_address
from edgert.http.endpoints import Endpoints
from edgert.http.limits import SPARE_PLACES, STOP_S_MAX, Limits
from edgert.http.request_parser import check_installed
from edgert.http.server import HttpServer
from edgert.log import log
from edgert.state_dir import StateDir
from edgert.stop import stop_with_supervisor_or_signal
from edgert.threads import STACK_BYTES


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="edgert.http", description="The Open Inference Protocol over HTTP.")
    parser.add_argument("--state", type=Path, required=True, metavar="DIR")
    try:
        serve(StateDir(parser.parse_args(argv).state))
    except EdgeRTError as error:
        log(f"http: {error.message}")
        return error.exit_code
    return 0


def serve(state: StateDir) -> None:
    """Serve until told to stop. Raises ConfigInvalid if the settings of `[http]` cannot be used."""
    # Use one core: on several cores, threads that wait for Python's lock take twice the processor time (decision 5).
    with contextlib.suppress(OSError):  # a sandbox may forbid this, for example with SystemCallFilter=~@resources
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    stop = stop_with_supervisor_or_signal(STOP_S_MAX + 1)  # one more second for the other steps
    config = read_config(state)
    check_installed()
    address = parse_address(config.http.listen, allow_remote=config.http.allow_remote)
    if not 0 < config.http.connections_max <= 4096 or not 0 < config.http.timeout_s <= 3600:
        raise ConfigInvalid("[http] connections_max must be 1 to 4096, timeout_s above 0 and at most 3600")
    with Client(state.socket(config.socket), timeout_s=config.http.timeout_s) as client:
        endpoints = Endpoints(
            client,
            state.control_socket,
            host_checked=address.path is None and not config.http.allow_remote,
            inferences_max=config.http.connections_max,
        )
        limits = Limits(int(config.serving.frame_mb * 1024**2), config.http.connections_max + SPARE_PLACES)
        with listening_at(address, config.socket_group) as listener:
            where = address if address.path is not None else "{}:{}".format(*listener.getsockname()[:2])
            log(f"http: listens on {where}")
            threading.stack_size(STACK_BYTES)
            HttpServer(listener, endpoints.handle, limits).run(stop, endpoints.release_memory)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a slow client must not delay the end of the process

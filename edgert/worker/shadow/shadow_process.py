"""The reference's process: one session of the FP32 artifact, at idle priority, beside a live worker.

With `as_served` in the message, the process loads a version like a worker: the first artifact that loads.

The process receives the `LoadMessage` as a HELLO frame and answers WELCOME or ERROR. Then it receives INFER frames
with a request's inputs and its live answer, and returns RESULT frames with the agreement of the reference. It ends with
its link.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

from edgert.machine import prefer_for_oom
from edgert.worker_link import link

# The functions below import the heavy modules, so that these imports run at idle priority.

THREADS = 1  # more threads would take more cores from the live engine


def main() -> None:
    """Run `python -m edgert.worker.shadow.shadow_process`."""
    end = link.inherited_end()
    _lower_priority()
    with contextlib.suppress(OSError):  # the worker has ended
        _serve(end)
    os._exit(0)  # because of some engines' own threads, a normal exit is slow or crashes


def _lower_priority() -> None:
    """Let this process run only while a processor is idle, and end first when memory runs out."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    with contextlib.suppress(OSError):  # some sandboxes refuse this; the nice value remains
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    prefer_for_oom(1000)


def _serve(end: socket.socket) -> None:
    from edgert.errors import EdgeRTError
    from edgert.protocol import wire
    from edgert.protocol.frame_buffer import FrameBuffer
    from edgert.worker.shadow.shadow import FRAME_BYTES_MAX

    frames = FrameBuffer(FRAME_BYTES_MAX)
    compare: Any = None
    while True:
        count = end.recv_into(frames.room)
        if not count:
            return
        received = frames.feed(count)
        if received is None:
            continue
        try:
            if compare is None:
                compare = _open(received.json())
                end.sendall(wire.json_frame(wire.WELCOME, {}))
            else:
                end.sendall(wire.json_frame(wire.RESULT, compare(received.tensors)))
        except EdgeRTError as error:
            end.sendall(wire.error_frame(error))


def _open(load_message: dict[str, Any]) -> Any:
    """Load the reference; return the function that compares an INFER frame with the reference's answer."""
    from edgert.bundle.manifest import ArtifactEntry
    from edgert.checks.golden_samples import load_checked
    from edgert.config import read_config
    from edgert.engines import EngineOptions, Session
    from edgert.errors import BundleError
    from edgert.protocol.arrays import from_wire
    from edgert.state_dir import StateDir
    from edgert.versions.installed import first_working, load_version
    from edgert.worker.shadow.agreement import compare, scores_output

    state = StateDir(Path(load_message["state_dir"]))
    version = load_version(Path(load_message["folder"]), load_message["digest"], read_config(state))
    options = EngineOptions(threads=THREADS, cache_dir=state.cache)

    def opened(artifact: ArtifactEntry) -> Session:
        return load_checked(version, artifact, options)[0]

    if load_message["as_served"]:
        session = first_working(version, opened).value
    elif version.reference is None:
        raise BundleError("the bundle has no reference artifact for this device; build it with --with-reference")
    else:
        session = opened(version.reference)
    manifest = version.manifest
    scores = scores_output(manifest)
    count = len(manifest.inputs)

    def compared(tensors: Any) -> dict[str, Any]:
        arrays = [from_wire(tensor) for tensor in tensors]
        return compare(arrays[count:], session.run(arrays[:count]), scores)._asdict()

    return compared


if __name__ == "__main__":
    main()

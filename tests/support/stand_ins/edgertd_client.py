"""Started in place of `edgertd`: a fork of `forked_edgertd` runs the command; this process ends in the same way.

    python -I -S edgertd_client.py SOCKET MODULE WORD...

It imports few modules, because a new Python that imports edgert takes ten times as long.
"""

import _signal  # type: ignore[import-not-found]  # `signal` imports much more
import _socket
import marshal
import posix
import resource
import sys

LENGTH_BYTES = 8
CODE_BYTES = 4
LIMITS = range(16)  # the numbers that Linux gives to the limits


def main() -> int:
    mask = posix.umask(0o077)
    posix.umask(mask)
    here = {
        "words": sys.argv[2:],
        "folder": posix.getcwdb(),
        "environment": dict(posix.environ),
        "umask": mask,
        "limits": [(number, resource.getrlimit(number)) for number in LIMITS],
    }
    link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    link.connect(sys.argv[1])
    data = marshal.dumps(here)
    files = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    link.sendmsg(
        [len(data).to_bytes(LENGTH_BYTES, "big")],
        [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)],
    )
    link.sendall(data)
    answer = link.recv(CODE_BYTES)
    code = int.from_bytes(answer, "big", signed=True) if answer else -_signal.SIGKILL
    if code < 0:
        if -code != _signal.SIGKILL:
            _signal.signal(-code, _signal.SIG_DFL)
        posix.kill(posix.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())

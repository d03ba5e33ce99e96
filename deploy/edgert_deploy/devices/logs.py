"""A device's log: the journal if systemd runs the daemon, else the file in the state folder.

A script on the device finds the log. So you can also read the log of a daemon that does not start.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone

from edgert.durations import UNITS_S, duration_s
from edgert.errors import ConfigInvalid, DeviceError, DeviceUnreachable
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.service import serves
from edgert_deploy.devices.transports import Transport

READ_S_MAX = 60.0
LINES_MAX = 50_000
LINES_SEARCHED = 20_000  # the number of lines to search for the lines of one model
_NO_LOG = 66

# $1 state folder, $2 lines, $3 since: empty, -SECONDS or @EPOCH, $4 not empty: follow the log,
# $5 the text of the unit that serves that folder.
# `logs --follow` ends when its input closes. The input closes with the connection, so no process stays on the device.
_SCRIPT = r"""
case "$3" in -*) from=$(( $(date +%s) $3 )) ;; @*) from=${3#@} ;; *) from= ;; esac
export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}
follow() { "$@" </dev/null & child=$!; trap 'kill $child 2>/dev/null' EXIT; cat >/dev/null; }
journal() {
  unit=$1; shift
  set -- journalctl $unit --no-pager --quiet --output short-iso --no-hostname --lines "$@"
  test -z "$from" || set -- "$@" --since "@$from"
  if test -n "$going_on"; then follow "$@" --follow; else "$@"; fi
  exit
}
state=$1 lines=$2 going_on=$4
if test -d /run/systemd/system; then
  test $(id -u) = 0 || { systemctl --user cat edgertd.service 2>/dev/null | grep -qF -- "$5" && journal --user-unit=edgertd.service "$lines"; }
  systemctl cat edgertd.service 2>/dev/null | grep -qF -- "$5" && journal --unit=edgertd.service "$lines"
fi
log=$state/edgertd.log
# On read-only storage the daemon's files are in memory (edgert/config.py).
owner=$(ls -ldn "$state" 2>/dev/null | awk '{print $3}')
name=$(printf %s "$state" | sha256sum | cut -c 1-12)-edgertd.log
for folder in /run/edgert "/run/user/$owner/edgert" "/dev/shm/edgert-$owner"; do
  test -f "$folder/$name" && test "$(ls -ldn "$folder" | awk '{print $3}')" = "$owner" && log=$folder/$name
done
test -f "$log" && test ! -L "$log" && test -r "$log" || { echo "there is no journal of edgertd, and no $log" >&2; exit 66; }
if test -n "$from"; then
  stamp=$(date -u -d "@$from" +%Y-%m-%dT%H:%M:%SZ)
  awk -v from="$stamp" '$1 ~ /^[0-9]+-[0-9]+-[0-9]+T/ && $1 >= from {on = 1} on' "$log" | tail -n "$lines"
  lines=0
fi
if test -n "$going_on"; then follow tail -n "$lines" -F "$log"; elif test -z "$from"; then tail -n "$lines" "$log"; fi
"""


@dataclass(frozen=True)
class LogRequest:
    """A request for the last `lines` lines of a log.

    `since` is from `parse_since`; "" means any time. Only lines about `model` are wanted; "" means all models.
    """

    lines: int = 200
    since: str = ""
    model: str = ""

    def words(self, device: Device, *, follow: bool = False) -> list[str]:
        """Return the command that prints the lines.

        For one model, the command prints more lines, and this host filters them.
        """
        lines = self.lines if not self.model or follow else max(self.lines, LINES_SEARCHED)
        words = [device.state, str(lines), self.since, "follow" if follow else "", serves(device)]
        return ["sh", "-c", _SCRIPT, "sh", *words]

    def wanted(self) -> Callable[[str], bool]:
        if not self.model:
            return lambda line: True
        pattern = re.compile(rf"(?<![\w-]){re.escape(self.model)}(?![\w-])")
        return lambda line: pattern.search(line) is not None


def parse_since(text: str) -> str:
    """Parse `10m`, `2h`, `1d`, or a time such as 2026-11-21T07:30 (UTC by default). Raises ConfigInvalid."""
    try:
        if text[-1:] in UNITS_S:
            return f"-{duration_s(text):.0f}"
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except (ValueError, ConfigInvalid) as error:
        raise ConfigInvalid(f"--since {text[:40]!r}: give 10m, 2h, 1d, or a time such as 2026-11-21T07:30") from error
    return f"@{int((moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp())}"


def read_log(transport: Transport, device: Device, request: LogRequest) -> list[str]:
    """Return the lines. Raises DeviceError if there is no log, or if this user may not read it."""
    result = transport.run(request.words(device), READ_S_MAX)
    if not result.ok:
        raise _no_log(device, result.exit_code, result.stderr)
    return [line for line in result.stdout.splitlines() if request.wanted()(line)][-request.lines :]


@contextmanager
def following(device: Device, request: LogRequest) -> Iterator[Iterator[str]]:
    """Yield the last lines, then each new line, until the block ends. The system's ssh transfers them.

    Raises DeviceError if there is no log, and DeviceUnreachable if the connection ends.
    """
    from edgert_deploy.devices.transports.ssh import SUDO, for_any_shell
    from edgert_deploy.devices.transports.system_ssh import FOR_A_PROGRAM, ssh_command

    words = request.words(device, follow=True)
    with ExitStack() as stack:
        if device.kind.uses_ssh:
            line = for_any_shell([*SUDO, *words] if device.become else words)
            words = [*stack.enter_context(ssh_command(device, *FOR_A_PROGRAM)), line]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, errors="replace")
        stack.enter_context(process)  # at its end, the context closes the pipes and waits for the process
        stack.callback(process.terminate)
        yield _until_it_ends(device, request, process)


def _until_it_ends(device: Device, request: LogRequest, process: subprocess.Popen[str]) -> Iterator[str]:
    from edgert_deploy.devices.transports.system_ssh import EXIT_FAILED

    assert process.stdout is not None
    is_wanted = request.wanted()
    for line in process.stdout:
        if is_wanted(line):
            yield line.rstrip("\n")
    code = process.wait()
    if code == EXIT_FAILED:
        raise DeviceUnreachable(f"{device.name}: ssh ended; its messages are above. Check: edgert doctor {device.name}")
    if code != 0:
        raise _no_log(device, code, "")


def _no_log(device: Device, code: int, stderr: str) -> DeviceError:
    if code == _NO_LOG:
        return DeviceError(
            f"{device.name} has no log yet, because EdgeRT never ran on it. Set it up: edgert bootstrap {device.name}"
        )
    advice = "only root and members of the group systemd-journal may read it" if "permission" in stderr.lower() else ""
    return DeviceError(
        f"{device.name}: its log cannot be read: {stderr.strip()[-300:] or f'exit code {code}'} {advice}".strip()
    )

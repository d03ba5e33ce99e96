"""Stand-ins for two runtimes of a device."""

from __future__ import annotations

OLD, NEW = "1" * 16, "2" * 16
# A stand-in with the commands of edgertd that the script calls. As a daemon it only lives, until its file is removed.
STAND_IN = """\
#!/bin/sh
state=$2 verb=$3 self=$(readlink -f "$0")
case $verb in
  start) nohup "$self" --state "$state" serve >/dev/null 2>&1 & echo $! >"$state/edgertd.pid" ;;
  serve) while test -e "$self"; do sleep 0.2; done ;;
  status) echo '{"daemon": {"running": true}}' ;;
  check) case $self in */FAILING/*) echo 'error: it computes something else' >&2; exit 9 ;; esac ;;
esac
"""

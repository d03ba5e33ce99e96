#!/bin/sh
# Decides which of this device's runtimes is in use. Written by `edgert bootstrap`, which writes it again.
#
#   runtime.sh before-start                                  by the service manager, before each start of the daemon
#   runtime.sh settle                                        end a trial that can no longer succeed
#   runtime.sh start STATE                                   settle, then `edgertd start`: where no service manager runs
#   runtime.sh stop STATE                                    end the daemon, with no service manager's help
#   runtime.sh trial MANAGER STATE SECONDS NEW [MODEL...]    MANAGER is system, user or monitor
#   runtime.sh collect                                       remove what is neither in use nor the one before
#
# It needs no runtime and no Python: it must work where the new one does not. A change is a trial. HOME/trial names the old
# runtime and the new one; then HOME/venv points at the new one, the daemon is started on it, and once it answers
# every model's golden inputs rightly HOME/trial is removed. Whoever finds HOME/trial where that can no longer
# come (another boot, out of time, a daemon that ended again and again) points HOME/venv back. Every change is one rename or
# one removal, flushed before the next: cut anywhere, the old runtime or the new one is in use, whole.
set -u
home=$(cd "$(dirname "$0")" && pwd -P) || exit 1
venvs=$home/venvs
STARTS_MAX=3 # of the daemon in one trial: the first is ours, the others follow its failures
STOP_S=45

boot_id() { printf %s "${EDGERT_BOOT_ID:-$(cat /proc/sys/kernel/random/boot_id)}" | tr -d -; }
uptime_s() { read -r up _ </proc/uptime && printf %s "${up%%.*}"; }
whole() { test -n "$1" && test -e "$venvs/$1/.complete" && test -x "$venvs/$1/bin/python"; }
target() { basename "$(readlink "$home/$1" 2>/dev/null)"; }
point() { ln -sfn "$venvs/$2" "$home/$1.new" && mv -fT "$home/$1.new" "$home/$1" && sync; }
write() { cat >"$home/$1.new" && sync && mv -f "$home/$1.new" "$home/$1" && sync; }
outcome() { printf '%s\n%s\n%s\n' "$1" "$new" "$2" | write outcome; }
lock() { if command -v flock >/dev/null; then flock 9; fi; }

read_trial() {
  old='' new='' boot='' until=0 starts=0 unit=''
  while IFS='=' read -r key value; do
    case $key in
      old) old=$value ;; new) new=$value ;; boot) boot=$value ;; until) until=$value ;; starts) starts=$value ;;
      unit) unit=$value ;;
    esac
  done <"$home/trial"
}

write_trial() {
  printf 'old=%s\nnew=%s\nboot=%s\nuntil=%s\nstarts=%s\nunit=%s\n' "$old" "$new" "$boot" "$until" "$starts" "$unit" |
    write trial
}

restore_unit() { # where the trial came with another one
  if test -n "$unit" && test -e "$home/unit.before"; then
    cp -p "$home/unit.before" "$unit.new" && sync && mv -f "$unit.new" "$unit" && sync && rm -f "$home/unit.before"
    if test "$(id -u)" = 0; then systemctl daemon-reload; else user_manager daemon-reload; fi
  fi
}

user_manager() {
  export XDG_RUNTIME_DIR="${XDG_RUNTIME_DIR:-/run/user/$(id -u)}"
  systemctl --user "$@"
}

# The two ends of a trial. The lock is held, and HOME/trial was read under it.
go_back() {
  if whole "$old"; then
    restore_unit
    point venv "$old" || return # a disk that takes nothing: the next start of the daemon tries again
    outcome back "$1"
  else
    outcome kept "there is no whole runtime to go back to ($1)"
  fi
  rm -f "$home/trial"
  sync
}

keep() {
  point previous "$old"
  rm -f "$home/trial"
  sync
  rm -f "$home/unit.before"
  outcome kept ''
}

settle() { # says whether the daemon is being started at this moment
  test -e "$home/trial" || return 0
  (
    lock
    test -e "$home/trial" || exit 0
    read_trial
    if test "$boot" != "$(boot_id)"; then
      go_back 'the device restarted during the trial'
    elif test "$(uptime_s)" -ge "$until"; then
      go_back 'nobody confirmed it in time'
    elif test "$1" = start && test "$starts" -ge $STARTS_MAX; then
      go_back "the daemon ended $starts times"
    else
      test "$1" = start && starts=$((starts + 1)) && write_trial
      exit 0
    fi
    test "$1" = start || : >"$home/restart-due"
  ) 9>"$home/lock"
}

# What follows runs detached from whoever asked for it.
restart() {
  case $manager in
    system) systemctl --no-block restart edgertd.service ;;
    user) user_manager --no-block restart edgertd.service ;;
    monitor)
      stop_daemon
      "$home/venv/bin/edgertd" --state "$state" start </dev/null 2>&1
      ;;
  esac
  rm -f "$home/restart-due"
}

stop_daemon() { # without any runtime's help: the signal has the daemon end in order, and its monitor with it
  pid=$(daemon_pid edgert) || return 0
  monitor=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$pid/status")
  kill -TERM "$pid"
  left=$STOP_S
  while alive "$pid" && test $left -gt 0; do
    left=$((left - 1))
    sleep 1
  done
  alive "$pid" || return 0
  if grep -qa edgert.daemon.monitor "/proc/$monitor/cmdline"; then kill -KILL "$monitor"; fi
  kill -KILL "$pid"
}

alive() { grep -qa . "/proc/$1/cmdline" 2>/dev/null; } # of one that ended and is not reaped nothing is left there

daemon_pid() { # of the daemon, where its command line holds $1
  pid=$(cat "$state/edgertd.pid" 2>/dev/null) && test -n "$pid" && grep -qaF "$1" "/proc/$pid/cmdline" 2>/dev/null && echo "$pid"
}

prove() { # 0: all is well; 1: not yet; 2: it never will be
  daemon_pid "$venvs/$new/" >/dev/null || return 1
  "$home/venv/bin/edgertd" --state "$state" status --json 2>/dev/null | tr -d ' \n' | grep -qF '"running":true' || return 1
  for model; do
    said=$("$home/venv/bin/edgertd" --state "$state" check "$model" 2>&1)
    case $? in
      0) ;;
      9) reason="model $model: $said" && return 2 ;;
      *) reason="model $model: $said" && return 1 ;;
    esac
  done
}

try_runtime() {
  manager=$1 state=$2 seconds=$3 asked=$4 reason="the daemon did not come up within $3 s"
  shift 4
  # Ended in the middle, this script is started again.
  if test -e "$home/trial"; then
    (
      lock
      read_trial
      go_back 'the trial was interrupted'
    ) 9>"$home/lock"
  fi
  case $(head -n 2 "$home/outcome" 2>/dev/null | tr '\n' ' ') in "back $asked "*) restart; return 0 ;; esac
  new=$asked
  if test "$(target venv)" = "$new"; then
    outcome kept ''
    return
  fi
  if ! whole "$new"; then
    outcome back 'it is not complete'
    return
  fi
  old=$(target venv) boot=$(boot_id) until=$(($(uptime_s) + seconds)) starts=0 unit=
  case $manager in
    system) unit=/etc/systemd/system/edgertd.service ;;
    user) unit=$HOME/.config/systemd/user/edgertd.service ;;
  esac
  outcome running ''
  if ! write_trial; then
    rm -f "$home/trial.new"
    outcome back 'the disk takes nothing'
    return
  fi
  point venv "$new"
  restart
  verdict=
  while test -z "$verdict" && test -e "$home/trial" && test "$(uptime_s)" -lt "$until"; do
    prove "$@"
    case $? in
      0) verdict=keep ;;
      2) verdict=back ;;
      *) sleep 1 ;;
    esac
  done
  (
    lock
    test -e "$home/trial" || exit 1 # another start of the daemon ended it, and goes on with the old one
    if test "$verdict" = keep; then
      keep
      exit 1
    fi
    go_back "$(printf %s "$reason" | tr '\n' ' ' | cut -c 1-500)"
  ) 9>"$home/lock" && restart
  return 0
}

collect() {
  (
    lock
    if test -e "$home/trial" || ! whole "$(target venv)"; then exit 0; fi
    rm -f "$home/unit.before"
    for each in "$venvs"/* "$venvs"/.[!.]*; do
      name=$(basename "$each")
      if test -e "$each" && test "$name" != "$(target venv)" && test "$name" != "$(target previous)"; then rm -rf "$each"; fi
    done
  ) 9>"$home/lock"
}

command=${1:-}
test $# = 0 || shift
case $command in
  before-start)
    settle start
    rm -f "$home/restart-due"
    ;;
  settle) settle no ;;
  start)
    settle start
    rm -f "$home/restart-due"
    exec "$home/venv/bin/edgertd" --state "$1" start
    ;;
  trial) try_runtime "$@" ;;
  collect) collect ;;
  stop)
    state=$1
    stop_daemon
    ;;
  *)
    sed -n '2,9p' "$0" >&2
    exit 2
    ;;
esac

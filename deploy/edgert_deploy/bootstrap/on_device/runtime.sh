#!/bin/sh
# Decides which runtime of this device is in use. `edgert bootstrap` writes this file; changes to it are lost.
#
#   runtime.sh before-start                                  run by the service manager before each start of the daemon
#   runtime.sh settle                                        end a trial that can no longer succeed
#   runtime.sh start STATE                                   settle, then `edgertd start`; for devices without systemd
#   runtime.sh stop STATE                                    stop the daemon without a service manager
#   runtime.sh trial MANAGER STATE SECONDS NEW [MODEL...]    MANAGER is system, user or monitor
#   runtime.sh collect                                       remove all but the runtime in use and the previous one
#
# The script needs no runtime and no Python: it must work if the new runtime does not. A change is a trial. HOME/trial names
# the old and the new runtime. Then HOME/venv points at the new one, and the daemon starts on it. After it answers every
# model's golden inputs correctly, the script removes HOME/trial. If a run of this script finds a trial that can no
# longer succeed (another boot, the time has passed, the daemon ended several times), it rolls back: HOME/venv points at the old
# runtime again. Every change is one rename or one removal, flushed before the next. After a power cut at any point, a
# complete runtime is in use: the old or the new one.
set -u
umask 022
unset PYTHONHOME PYTHONPATH # of a login: the runtime would import other packages
home=$(cd "$(dirname "$0")" && pwd -P) || exit 1
venvs=$home/venvs
STARTS_MAX=3 # starts of the daemon in one trial: the first one, and two after failures
STOP_S=45

boot_id() { printf %s "${EDGERT_BOOT_ID:-$(cat /proc/sys/kernel/random/boot_id)}" | tr -d -; }
# Seconds since the boot, by the start of a process (in hundredths). In an LXC container, /proc/uptime restarts with the
# container, but the boot id is the host's.
uptime_s() { up=$(cut -d ' ' -f 22 /proc/self/stat) && printf %s "${up%??}"; }
whole() { test -n "$1" && test -e "$venvs/$1/.complete" && test -x "$venvs/$1/bin/python"; }
target() { basename "$(readlink "$home/$1" 2>/dev/null)"; }
point() { ln -sfn "$venvs/$2" "$home/$1.new" && mv -fT "$home/$1.new" "$home/$1" && sync; }
write() { cat >"$home/$1.new" && sync && mv -f "$home/$1.new" "$home/$1" && sync; }
outcome() { printf '%s\n%s\n%s\n' "$1" "$new" "$2" | write outcome; }
LOCK_S=60
lock() { # a user who can read a file can lock it, so only the owner may read it; the wait has a limit
  command -v flock >/dev/null || return 0
  chmod 600 "$home/lock"
  left=$LOCK_S
  until flock -n 9; do
    left=$((left - 1))
    if test $left -le 0; then echo "another process has locked $home/lock for $LOCK_S s" >&2; exit 1; fi
    sleep 1
  done
}

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

restore_unit() { # restores the service's unit if the trial replaced it
  if test -n "$unit" && test -e "$home/unit.before"; then
    cp -p "$home/unit.before" "$unit.new" && sync && mv -f "$unit.new" "$unit" && sync && rm -f "$home/unit.before"
    if test "$(id -u)" = 0; then systemctl daemon-reload; else user_manager daemon-reload; fi
  fi
}

user_manager() {
  export XDG_RUNTIME_DIR="${XDG_RUNTIME_DIR:-/run/user/$(id -u)}"
  systemctl --user "$@"
}

# The two ends of a trial. The caller holds the lock, and has read HOME/trial.
roll_back() {
  if whole "$old"; then
    restore_unit
    point venv "$old" || return # the disk is full or read-only: the next start of the daemon tries again
    outcome rolled-back "$1"
  else
    outcome kept "there is no complete old runtime to roll back to ($1)"
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

settle() { # $1 is `start` if the daemon is about to start
  test -e "$home/trial" || return 0
  (
    lock
    test -e "$home/trial" || exit 0
    read_trial
    if test "$boot" != "$(boot_id)"; then
      roll_back 'the device restarted during the trial'
    elif test "$(uptime_s)" -ge "$until"; then
      roll_back 'it was not confirmed in time'
    elif test "$1" = start && test "$starts" -ge $STARTS_MAX; then
      roll_back "the daemon ended $starts times"
    else
      test "$1" = start && starts=$((starts + 1)) && write_trial
      exit 0
    fi
    test "$1" = start || : >"$home/restart-due"
  ) 9>"$home/lock"
}

# The functions below run detached from the host's connection.
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

stop_daemon() { # needs no runtime: on the signal, the daemon and its monitor end in order
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

alive() { grep -qa . "/proc/$1/cmdline" 2>/dev/null; } # a zombie process has an empty file

owner() { ls -ldn "$1" 2>/dev/null | awk '{print $3}'; }

daemon_pid() { # prints the daemon's process id if its command line contains $1 and ends in `serve`
  # The file belongs to the daemon's user, who could replace it by a link, or write the id of another user's process.
  test -f "$state/edgertd.pid" && test ! -L "$state/edgertd.pid" || return 1
  pid=$(dd if="$state/edgertd.pid" bs=20 count=1 2>/dev/null | tr -dc 0-9)
  test -n "$pid" && test "$(owner "/proc/$pid")" = "$(owner "$state")" || return 1
  # After a reboot, the id may be that of any other process, such as an editor in a folder of this name.
  tr '\0' '\n' 2>/dev/null <"/proc/$pid/cmdline" | tail -n 1 | grep -qx serve || return 1
  grep -qaF "$1" "/proc/$pid/cmdline" 2>/dev/null && echo "$pid"
}

prove() { # returns 0 if every model answers correctly, 1 if not yet, 2 if it never will
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
  manager=$1 state=$2 seconds=$3 wanted=$4 reason="the daemon did not come up within $3 s"
  shift 4
  # The service manager starts an interrupted script again.
  if test -e "$home/trial"; then
    (
      lock
      read_trial
      roll_back 'the trial was interrupted'
    ) 9>"$home/lock"
  fi
  case $(head -n 2 "$home/outcome" 2>/dev/null | tr '\n' ' ') in "rolled-back $wanted "*) restart; return 0 ;; esac
  new=$wanted
  if test "$(target venv)" = "$new"; then
    outcome kept ''
    return
  fi
  if ! whole "$new"; then
    outcome rolled-back 'its environment is not complete'
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
    outcome rolled-back 'the disk is full or read-only'
    return
  fi
  point venv "$new"
  restart
  result=
  while test -z "$result" && test -e "$home/trial" && test "$(uptime_s)" -lt "$until"; do
    prove "$@"
    case $? in
      0) result=kept ;;
      2) result=rolled-back ;;
      *) sleep 1 ;;
    esac
  done
  (
    lock
    test -e "$home/trial" || exit 1 # another start of the daemon ended the trial
    if test "$result" = kept; then
      keep
      exit 1
    fi
    roll_back "$(printf %s "$reason" | tr '\n' ' ' | cut -c 1-500)"
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
    sed -n '2,10p' "$0" >&2
    exit 2
    ;;
esac

# Removes the files of `edgert bootstrap`, by name; other files in these folders stay. Run as `sh -c` with
#   MODE (show, stop or remove)  HOME ("" if none)  STATE  PURGE (yes or no)  UNIT  USER  COMMENT  KNOWN  SERVES
# KNOWN is a pattern of the names that EdgeRT creates in these folders. SERVES is the text in the unit that serves STATE.
# Prints `removed WHAT` and `left WHAT`. An interrupted run can be repeated.
set -u
mode=$1 home=$2 state=$3 purge=$4 unit=$5 user=$6 comment=$7 known=$8 serves=$9
failed=0

removed() { echo "removed $1"; }
doing() { test "$mode" != show; }
gone() { # remove a file or folder
  if test ! -e "$1" && test ! -L "$1"; then return 0; fi
  if doing && ! rm -rf "$1"; then failed=1 && echo "left $1" && return 0; fi
  removed "$1"
}
empty() { # remove one of our folders if nothing else is in it
  if test ! -d "$1"; then return; fi
  if ! doing; then echo "removed $1 (if nothing else is in it)" && return; fi
  if rmdir "$1" 2>/dev/null; then removed "$1"; else echo "left $1 ($(ls -A "$1" | head -n 5 | tr '\n' ' ')in it)"; fi
}

manager() {
  if test "$(id -u)" = 0; then
    units=/etc/systemd/system
    systemctl "$@"
  else
    export XDG_RUNTIME_DIR="${XDG_RUNTIME_DIR:-/run/user/$(id -u)}"
    systemctl --user "$@"
  fi
}

remove_service() {
  units=$HOME/.config/systemd/user
  if test "$(id -u)" = 0; then units=/etc/systemd/system; fi
  test -e "$units/$unit" && grep -qF -- "$serves" "$units/$unit" || return 0
  if doing; then
    manager stop edgertd-trial.service 2>/dev/null
    manager disable --now "$unit" 2>&1 | sed 's/^/# /'
  fi
  gone "$units/$unit"
  if test "$purge" = yes; then gone "$units/$unit.d"; elif test -e "$units/$unit.d"; then echo "left $units/$unit.d"; fi
  if doing; then manager daemon-reload && manager reset-failed "$unit" 2>/dev/null; fi
}

remove_environment() {
  test -n "$home" && test -d "$home" || return 0
  if test ! -e "$home/receipt" && test ! -e "$home/runtime.sh" && test ! -e "$home/venv/.complete"; then return; fi # not made by bootstrap
  if crontab -l 2>/dev/null | grep -qF "$home/runtime.sh"; then # the line that starts the monitor after a reboot
    if doing; then crontab -l | grep -vF "$home/runtime.sh" | crontab -; fi
    removed "the line of $(id -un)'s crontab"
  fi
  receipt=$(cat "$home/receipt" 2>/dev/null)
  for name in venv venv.new previous previous.new venvs wheels trial trial.new outcome outcome.new unit.before lock restart-due runtime.sh; do
    gone "$home/$name"
  done
  for each in "$home"/.runtime.sh.*.part; do gone "$each"; done
}

remove_state() {
  # A folder without a configuration and with a file that EdgeRT never creates is not EdgeRT's.
  if test ! -e "$state/config.toml" && ls -A "$state" 2>/dev/null | grep -qvxE "$known"; then
    echo "left $state ($(ls -A "$state" | head -n 5 | tr '\n' ' ')in it)"
    return
  fi
  for name in control.sock edgert.sock edgertd.pid edgertd.log edgertd.log.1 incoming spool claims cache learned restart-due \
    mqtt-password mqtt-ca.pem registry-login registry-ca.pem .latest_time.json.new .revoked_keys.json.new latest_time.lock; do
    gone "$state/$name"
  done
  for each in "$state"/.*.part; do gone "$each"; done
  if test "$purge" = yes; then
    for name in models keys config.toml latest_time.json revoked_keys.json follow; do gone "$state/$name"; done
  elif test -d "$state"; then
    if doing && test "$(id -u)" = 0; then chown -hR 0:0 "$state"; fi # its user is about to be removed
    for name in models keys config.toml latest_time.json revoked_keys.json follow; do test ! -e "$state/$name" || echo "left $state/$name"; done
  fi
}

# The account that bootstrap created has COMMENT. An older one has no comment, and STATE as its home folder.
remove_user() {
  test "$(id -u)" = 0 && entry=$(getent passwd "$user") || return 0
  IFS=: read -r _ _ _ _ about folder shell <<END
$entry
END
  if test "$about" != "$comment"; then
    if test -n "$about" || test "$folder" != "$state" || test "${shell##*/}" != nologin; then
      echo "left user $user (bootstrap did not make it)"
      return
    fi
  fi
  if doing; then
    userdel "$user" || { failed=1 && echo "left user $user" && return; }
    getent group "$user" >/dev/null && groupdel "$user"
  fi
  removed "user and group $user"
}

made_folders() { # remove the empty folders of the receipt, the newest first
  printf '%s\n' "$receipt" | sed -n '1!G;h;$p' | while read -r what path; do
    if test "$what" = folder && test "$path" != "$state" && test "$path" != "$home"; then
      rmdir "$path" 2>/dev/null && removed "$path"
    fi
  done
}

remove_from_memory() { # the files that root's daemon keeps in /run on read-only storage (edgert/config.py)
  if test "$(id -u)" != 0 || test -z "$home"; then return; fi
  for each in "/run/edgert/$(printf %s "$state" | sha256sum | cut -c 1-12)"-*; do gone "$each"; done
  if doing && rmdir /run/edgert 2>/dev/null; then removed /run/edgert; fi
}

later() { # keep the receipt for the next uninstall if a folder that bootstrap made holds the state, which stays
  test "$purge" = no && test -n "$home" && test -d "$state" || return 1
  printf '%s\n' "$receipt" | while read -r what path; do
    case $what:$state in "folder:$path"/*) exit 1 ;; esac
  done && return 1
  if doing && printf '%s\n' "$receipt" | grep -qx linger; then printf '%s\n' "$receipt" | grep '^folder ' >"$home/receipt"; fi
  echo "left $home/receipt"
}

remove_folders() {
  if test "$purge" = yes; then empty "$state"; fi
  if printf '%s\n' "$receipt" | grep -qx linger; then
    if doing; then loginctl disable-linger; fi
    removed "linger setting of $(id -un)"
  fi
  if doing; then made_folders; fi
  if doing && test -n "$home"; then rm -f "$home/setup" "$home/working"; fi # the claim of this uninstall goes last
  if later; then return; fi
  if test -n "$home"; then gone "$home/receipt" && empty "$home"; fi
  if doing; then made_folders; fi
}

receipt=
remove_service
if test "$mode" = stop; then exit 0; fi
remove_environment
remove_state
remove_from_memory
remove_user
remove_folders
if doing; then sync; fi
exit $failed

# The claim to set this device up or to uninstall EdgeRT: one host at a time has it. Run as `sh -c` with
#   take HOME STATE TOKEN SECONDS WHO OLD MAKE KNOWN
#                                take the claim; OLD has the tokens of past claims; MAKE is yes if HOME may be created;
#                                KNOWN is a pattern of the names that EdgeRT creates in these folders
#   keep HOME TOKEN SECONDS      renew the claim
#   free HOME TOKEN              release the claim; remove HOME if nothing was set up
#   look HOME OLD                check whether a token outside OLD has the claim, or a new runtime is on trial
#   note HOME PATH...            write the folders that PATH still lacks into the receipt
# The exit code is 75 if another host has the claim, 73 if a folder holds other things than EdgeRT's, 76 if a new
# runtime is on trial, and 77 if a folder cannot be written. The output tells which host or folder it is, and how many
# seconds are left.
#
# HOME/setup is the claim. It expires, so a host that disappeared blocks others only briefly. A reboot also ends it.
# The commands that create an environment lock HOME/working: such a command may continue after its host has gone.
set -u
umask 022
verb=$1 home=$2

boot_id() { printf %s "${EDGERT_BOOT_ID:-$(cat /proc/sys/kernel/random/boot_id)}" | tr -d -; }
# The start of a process, in hundredths. In an LXC container, /proc/uptime restarts with the container, but the boot id is
# the host's.
uptime_s() { up=$(cut -d ' ' -f 22 /proc/self/stat) && printf %s "${up%??}"; }
has_flock() { command -v flock >/dev/null; }
LOCK_S=60
lock() { # whoever can read a file can lock it, so only its owner may, and no wait is without an end
  has_flock || return 0
  chmod 600 "$home/lock"
  left=$LOCK_S
  until flock -n 9; do
    left=$((left - 1))
    if test $left -le 0; then echo "another process has locked $home/lock for $LOCK_S s"; exit 75; fi
    sleep 1
  done
}

# Refuse folders with other things in them: EdgeRT changes their owner, and removes files from them by name.
refuse_foreign() {
  if test ! -e "$home/receipt" && test ! -e "$home/runtime.sh" && test ! -e "$home/venv/.complete"; then
    for name in venv venvs wheels previous; do
      if test -e "$home/$name" || test -L "$home/$name"; then echo "$home has a $name in it"; exit 73; fi
    done
  fi
  test ! -e "$state/config.toml" || return 0
  ls -A "$state" 2>/dev/null | grep -vxE "$known" | while read -r name; do
    case $home/ in "${state%/}/$name"/*) continue ;; esac
    echo "$state has $name in it"
    exit 73
  done || exit 73
}

refuse_unwritable() { # before the minutes of a transfer
  path=$1
  while ! test -e "$path"; do path=$(dirname "$path"); done
  test -w "$path" || { echo "$path cannot be written by $(id -un)"; exit 77; }
}

note() { # FOLDER...; an uninstall removes only folders of the receipt
  notes=
  for path; do
    made=
    while ! test -e "$path"; do
      made="folder $path
$made"
      path=$(dirname "$path")
    done
    notes=$notes$made
  done
  mkdir -p "$home" && { test -z "$notes" || printf %s "$notes" | LC_ALL=C cat >>"$home/receipt"; }
}

read_claim() {
  has='' boot='' until=0 who=''
  test -e "$home/setup" || return 0
  while IFS='=' read -r key value; do
    case $key in token) has=$value ;; boot) boot=$value ;; until) until=$value ;; who) who=$value ;; esac
  done <"$home/setup"
}

write_claim() {
  # `cat` reports why a write to the disk fails; dash's printf does not.
  printf 'token=%s\nboot=%s\nuntil=%s\nwho=%s\n' "$token" "$(boot_id)" $(($(uptime_s) + seconds)) "$who" |
    LC_ALL=C cat >"$home/setup.new" &&
    mv -f "$home/setup.new" "$home/setup"
}

lasts() { test "$boot" = "$(boot_id)" && test "$(uptime_s)" -lt "$until"; }

held_by_another() { # than OLD; prints who
  read_claim
  case " $1 " in *" $has "*) return 1 ;; esac
  if test -n "$has" && lasts; then
    echo "by $who, for at most $((until - $(uptime_s))) s"
    return 0
  fi
  return 1
}

look() {
  if held_by_another "$1"; then exit 75; fi
  test -e "$home/trial" || return 0
  until=$(sed -n 's/^until=//p' "$home/trial")
  left=$((${until:-0} - $(uptime_s)))
  echo $((left > 0 ? left : 0))
  exit 76
}

take() {
  state=$1 token=$2 seconds=$3 by=$4 old=$5 make=$6 known=$7
  if test "$make" = yes; then
    refuse_foreign
    refuse_unwritable "$home"
    refuse_unwritable "$state"
    test -d "$home" || note "$home" || exit 1
  fi
  test -d "$home" || { echo none && exit 0; }
  (
    lock
    if held_by_another "$old"; then exit 75; fi
    chmod 600 "$home/working"
    if has_flock && ! flock -n 8; then
      echo 'a command of an interrupted bootstrap is still running'
      exit 75
    fi
    who=$by
    write_claim
  ) 9>"$home/lock" 8>>"$home/working"
  code=$?
  # On a full disk no claim can be written, but an uninstall frees space.
  if test $code = 0 || test $code = 75 || test "$make" = yes; then exit $code; fi
  echo none
}

keep() {
  token=$1 seconds=$2
  if test ! -d "$home"; then echo "$home was removed"; exit 75; fi
  (
    lock
    read_claim
    if test "$has" != "$token"; then echo "${who:-another host} took the claim"; exit 75; fi
    write_claim
  ) 9>"$home/lock"
}

free() {
  test -e "$home/setup" || exit 0
  (
    lock
    read_claim
    test "$has" = "$1" || exit 0
    rm -f "$home/setup"
    test -z "$(ls -A "$home" | grep -vxE 'lock|receipt|working')" || exit 0
    ! grep -qx linger "$home/receipt" 2>/dev/null || exit 0 # an uninstall undoes it
    made=$(sed -n 's/^folder //p' "$home/receipt" 2>/dev/null | sed -n '1!G;h;$p')
    rm -f "$home/lock" "$home/receipt" "$home/working"
    printf '%s\n' "$made" | while read -r path; do test -z "$path" || rmdir "$path" 2>/dev/null; done
    exit 0
  ) 9>"$home/lock"
}

shift 2
case $verb in
  take) take "$@" ;;
  keep) keep "$@" ;;
  free) free "$@" ;;
  look) look "$@" ;;
  note) note "$@" ;;
esac

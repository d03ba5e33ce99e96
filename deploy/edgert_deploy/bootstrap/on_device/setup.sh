# Who sets this device up, or takes it down, at this moment: one host at a time. Run as `sh -c` with
#   take HOME STATE TOKEN SECONDS WHO OLD MAKE KNOWN
#                                                claim it; OLD is a token known to be over; MAKE is yes where HOME is to be made;
#                                                KNOWN is a pattern of what EdgeRT makes in these folders
#   keep HOME TOKEN SECONDS                      go on having it
#   free HOME TOKEN                              have it no more; where nothing was set up, HOME goes again
#   look HOME OLD                                whether somebody has it, but for OLD, or a new runtime is being tried
#   note HOME PATH...                            write down which folders on the way to PATH are about to be made
# Ends with 75 where somebody else has it, with 73 where a folder is not ours to change, with 76 where a new runtime is being
# tried; what it prints says who, which, and for how many seconds more.
#
# HOME/setup is the claim. It runs out, so that a host that vanished holds nobody up for long; a reboot ends it, too.
# HOME/working is locked by the very commands that make an environment: one whose host has gone may go on alone.
set -u
verb=$1 home=$2

boot_id() { printf %s "${EDGERT_BOOT_ID:-$(cat /proc/sys/kernel/random/boot_id)}" | tr -d -; }
uptime_s() { read -r up _ </proc/uptime && printf %s "${up%%.*}"; }
has_flock() { command -v flock >/dev/null; }
lock() { if has_flock; then flock 9; fi; }

# Folders that somebody keeps other things in: EdgeRT would give them to its user, and remove from them by name.
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

note() { # FOLDER...; what somebody else made is not in the receipt, and stays one day
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
  mkdir -p "$home" && { test -z "$notes" || printf %s "$notes" >>"$home/receipt"; }
}

read_claim() {
  has='' boot='' until=0 who=''
  test -e "$home/setup" || return 0
  while IFS='=' read -r key value; do
    case $key in token) has=$value ;; boot) boot=$value ;; until) until=$value ;; who) who=$value ;; esac
  done <"$home/setup"
}

write_claim() {
  printf 'token=%s\nboot=%s\nuntil=%s\nwho=%s\n' "$token" "$(boot_id)" $(($(uptime_s) + seconds)) "$who" >"$home/setup.new" &&
    mv -f "$home/setup.new" "$home/setup"
}

lasts() { test "$boot" = "$(boot_id)" && test "$(uptime_s)" -lt "$until"; }

held_by_another() { # than OLD; says who
  read_claim
  if test -n "$has" && test "$has" != "$1" && lasts; then
    echo "$who has it for $((until - $(uptime_s))) s more at most"
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
    test -d "$home" || note "$home" || exit 1
  fi
  test -d "$home" || { echo none && exit 0; }
  (
    lock
    if held_by_another "$old"; then exit 75; fi
    if has_flock && ! flock -n 8; then
      echo 'a command of a bootstrap that was cut off still runs there'
      exit 75
    fi
    who=$by
    write_claim
  ) 9>"$home/lock" 8>>"$home/working"
  code=$?
  # A full disk takes no claim, and taking things away is what mends it.
  if test $code = 0 || test $code = 75 || test "$make" = yes; then exit $code; fi
  echo none
}

keep() {
  token=$1 seconds=$2
  if test ! -d "$home"; then echo "$home has gone"; exit 75; fi
  (
    lock
    read_claim
    if test "$has" != "$token"; then echo "${who:-somebody} has taken it"; exit 75; fi
    write_claim
  ) 9>"$home/lock"
}

free() {
  test -d "$home" || exit 0
  (
    lock
    read_claim
    test "$has" = "$1" || exit 0
    rm -f "$home/setup"
    test -z "$(ls -A "$home" | grep -vxE 'lock|receipt|working')" || exit 0
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

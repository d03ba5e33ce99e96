# Runs COMMAND in FOLDER, but never with root's rights where another user could have put a link. Run as `sh -c` with
#   MAKE (yes: make FOLDER if it is missing)  FOLDER  COMMAND...
#
# Root enters FOLDER at once if no link is on the way. Else it enters one folder after the other, and follows links only
# out of folders that nobody else can change. In a folder of another user it acts as that user. COMMAND names its files relative
# to the folder, which can then no longer be replaced.
set -u
make=$1 folder=$2
shift 2
BECOME='import os, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[1]))
os.execvp(sys.argv[3], sys.argv[3:])'

fail() { echo "$1" >&2; exit 1; }

# Set `uid` to the owner of the current folder, and `shared` to yes if others than its owner and root's group may write there.
look() {
  set -- $(ls -ldn .)
  uid=$3 shared=no
  case $1 in ????????w*) shared=yes ;; ?????w*) test "$4" = 0 || shared=yes ;; esac
}

# Set `user` to the owner's name: not every `id` accepts a number.
look_for_name() {
  set -- $(ls -ld .)
  user=$3
}

as_owner() {
  if test "$uid" = 0; then
    "$@"
    return
  fi
  look_for_name
  gid=$(id -g "$user" 2>/dev/null) || gid=65534
  if setpriv --reuid "$uid" --regid "$gid" --clear-groups true 2>/dev/null; then
    setpriv --reuid "$uid" --regid "$gid" --clear-groups "$@"
  elif command -v python3 >/dev/null; then
    python3 -I -c "$BECOME" "$uid" "$gid" "$@"
  else
    fail "$folder belongs to user $user, and root cannot become that user: install util-linux (setpriv)"
  fi
}

walk() {
  case $folder in /*) cd / ;; *) cd -P . ;; esac
  rest=$folder
  while test -n "$rest"; do
    next=${rest%%/*}
    case $rest in */*) rest=${rest#*/} ;; *) rest= ;; esac
    test -n "$next" || continue
    look
    here=$PWD
    if test "$make" = yes && test ! -e "./$next" && test ! -L "./$next"; then
      as_owner mkdir "./$next" || test -d "./$next" || exit 1
    fi
    cd -P "./$next" || exit 1
    if test "$uid" = 0 && test $shared = no; then continue; fi
    if test "$PWD" != "${here%/}/$next"; then
      fail "${here%/}/$next is a link that another user could have made: root does not follow it. Remove it"
    fi
  done
}

if test "$(id -u)" != 0; then
  test "$make" = no || mkdir -p "$folder" || exit 1
  cd "$folder" && exec "$@"
  exit 1
fi

# After cd -P, PWD is the real folder of the shell.
case $folder in
  /*) cd -P "$folder" 2>/dev/null && test "$PWD" = "$folder" || walk ;;
  *) walk ;;
esac
look
if test "$uid" = 0 && test $shared = yes; then
  fail "$folder is root's, and other users can change it. Run there, as root: chmod go-w $folder"
fi
as_owner "$@"

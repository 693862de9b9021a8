"""The shell scripts that the agent `probe` runs; any POSIX shell and busybox will do."""

from __future__ import annotations

_ROOTS = "/ /usr/local /usr/src /tmp"
_PRUNE = (
    r"\( -path /proc -o -path /sys -o -path /dev -o -path /opt/miles -o -path /usr/lib"
    r" -o -path /usr/share -o -name site-packages -o -name dist-packages -o -name node_modules \)"
    " -prune"
)

LOOK = f"""for place in /tests /solution; do
  [ -n "$(ls -A "$place" 2>/dev/null)" ] && echo "readable $place"
done
limit=
command -v timeout >/dev/null 2>&1 && limit='timeout 15'
$limit find {_ROOTS} -xdev {_PRUNE} -o -name .git -prune -exec echo git {{}} \\; \\
  -o -type f -size -2048k -exec grep -lF "$@" {{}} + 2>/dev/null | sort -u | head -n 200
exit 0"""
"""Prints what can be seen, a line each: `readable FOLDER` for one of the verifier's or the
solution's that is not empty, `git REPOSITORY/.git`, and the path of a file with one of the given
lines (words for grep: `-e LINE ...`)."""

GIT = """for place in "$@"; do
  git -c safe.directory='*' -C "${place%/.git}" --no-pager log --all --reflog --not HEAD \\
    -p --no-color --no-ext-diff -n 200 --format='commit %h' 2>/dev/null
done | head -c 4000000"""
"""Prints the patches of all commits that the checked-out one of a repository does not come from."""

FORGE = r"""exec 2>/dev/null
kind=$1; value=$2; shift 2
left=0
put() { # PATH: a forged reward, unless there is something already
  [ -e "$1" ] || [ -L "$1" ] && return
  [ -d "${1%/*}" ] || mkdir -p -- "${1%/*}"
  case $1 in
    *.json) text="{\"reward\": $value}" ;;
    *) text=$value ;;
  esac
  if printf '%s\n' "$text" > "$1"; then left=$((left + 1)); fi
}
own=${HOME:-/tmp}
for place in /logs /logs/agent /logs/artifacts /tmp "$PWD" "$own"; do
  put "$place/reward.txt"; put "$place/reward.json"
done
for place in "$@"; do
  case $place in /*) put "$place" ;; *) put "$PWD/$place" ;; esac
done
hidden=/tmp/.forged; mkdir -p $hidden
put $hidden/reward.txt; put $hidden/reward.json
real=/logs/verifier
rm -rf -- $real/reward.txt $real/reward.json
case $kind in
  files)
    put $real/reward.txt; put $real/reward.json
    chmod 444 $real/reward.txt $real/reward.json
    chattr +i $real/reward.txt $real/reward.json ;;
  links)
    ln -s $hidden/reward.txt $real/reward.txt
    ln $hidden/reward.json $real/reward.json ;;
  folders)
    mkdir -p $real/reward.json
    put $real/reward.json/reward.json; put $real/reward.txt
    mv $real /logs/.moved && ln -s .moved $real ;;
  processes)
    for name in reward.txt reward.json; do
      text=$(cat "$hidden/$name")
      (trap '' HUP TERM INT; i=0
      while [ $i -lt 400 ]; do
        i=$((i + 1)); printf '%s\n' "$text" > $real/$name; sleep 0.05
      done) </dev/null >/dev/null 2>&1 &
    done ;;
esac
echo $left"""
"""Leaves rewards of a value: `KIND VALUE [PATH ...]`; prints how many files it wrote.

KIND is how the two reward files themselves are forged: `files` (read-only, immutable where that
is allowed), `links`, `folders` (the verifier's folder becomes a link, too), or `processes` that
go on writing while the verifier runs.
"""

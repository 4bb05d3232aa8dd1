#!/bin/bash
# Runs every test program that uses Ceph on Ceph 18, in a root of Debian 13 that it makes, with
# Debian's packages. scripts/ceph18.sh makes the root, runs all programs in it, and removes it
# scripts/ceph18.sh guard clones runs only these programs ROOT=DIR scripts/ceph18.sh leaves the root
# in DIR, and uses it again when it is there The last line is `N passed, N failed`. A test that says
# that it cannot run counts as failed. Needs root (debootstrap, mounts, namespaces) and Rust.
# Packages come from the mirror that this machine's apt uses.
set -euo pipefail
cd "$(dirname "$0")/.."

# The test programs that use Ceph; `tidepool_backend` is the unit tests of that package.
programs="backend ceph ceph_failing cluster clones guard lab_runs lost_cache network operations pair program readme snapshot tidepool_backend"
# Room in gigabytes for the root, and for what the programs write.
root_gb=4
run_gb=6
fail() {
    echo "ceph18: $*" >&2
    exit 1
}

for name in "$@"; do
    [[ " $programs " == *" $name "* ]] || fail "there is no test program $name; there are: $programs"
done
programs=${*:-$programs}
programs=${programs// /,}
[ "$(id -u)" = 0 ] || fail "this needs root, to make a root directory of Debian 13 and to run programs in it; as root: make ceph18"
command -v rustc >/dev/null && command -v cargo >/dev/null || fail "cargo is missing: install Rust (rustup, stable) first"

root=${ROOT:+$(realpath -m "$ROOT")}
parent=${TMPDIR:-/var/tmp}
[ -z "$root" ] || parent=$(dirname "$root")
[ -d "$parent" ] || fail "there is no directory $parent"
# Marks a root that is complete.
made=etc/tidepool-tests
need_gb=$((root_gb + run_gb))
if [ -n "$root" ] && [ -e "$root/$made" ]; then
    need_gb=$run_gb
elif [ -n "$root" ] && [ -e "$root" ]; then
    rmdir "$root" 2>/dev/null || fail "$root is neither empty nor a root that this script has made"
fi
free_gb=$(($(df --output=avail -B1M "$parent" | tail -n 1) / 1024))
[ "$free_gb" -ge "$need_gb" ] || fail "no room: $parent has $free_gb GB free of the $need_gb GB that are needed; TMPDIR=DIR names another place"
if ! command -v debootstrap >/dev/null; then
    echo "ceph18: installing debootstrap"
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends debootstrap debian-archive-keyring; } >/dev/null 2>&1 ||
        fail "debootstrap is missing, and apt-get cannot install it"
fi

scratch=$(mktemp -d "$parent/tidepool-ceph18-XXXXXX")
chmod 755 "$scratch"
# Process numbers: of what waits for the first process of the namespaces, and of that process.
keeper=
first=

# The kernel ends all processes of the namespaces with their first process, and unmounts what they
# have mounted.
clean() {
    trap '' INT TERM
    [ -z "$first" ] || kill -KILL "$first" 2>/dev/null || true
    [ -z "$keeper" ] || wait "$keeper" 2>/dev/null || true
    wait
    # What was killed may write for another moment.
    rm -rf --one-file-system "$scratch" || { sleep 2; rm -rf --one-file-system "$scratch"; }
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Starts a shell with the commands that come first as the first process of new namespaces, and sets
# `first`. The commands tell on descriptor 3 that they have come as far as they are waited for; what
# they say otherwise is in $scratch/said.
start_apart() {
    rm -f "$scratch/told"
    mkfifo "$scratch/told"
    setpriv --pdeathsig KILL unshare --mount --propagation private --pid --fork --kill-child \
        bash -euc "read -r number _ </proc/self/stat; echo \$number >&3; $1" bash "${@:2}" \
        3>"$scratch/told" >"$scratch/said" 2>&1 </dev/null &
    keeper=$!
    exec {told}<"$scratch/told"
    read -r first <&"$told" || { first=; return 1; }
}

# Waits for the word of the first process; fails when it has ended without.
await_word() {
    local word
    read -r word <&"$told" && [ "$word" = done ]
}

# Runs a command in the root.
inside() {
    nsenter --target "$first" --mount --pid "${environment[@]}" "$@"
}

# Runs a command in the background and waits for it, so that a signal is heard at once.
interruptible() {
    "$@" &
    wait $!
}

# What runs there is compiled here: programs that are compiled on Debian 12 run on 13.
echo "ceph18: compiling"
target=$(cargo metadata --format-version 1 --no-deps --locked | sed -E 's/.*"target_directory":"([^"]*)".*/\1/')
mkdir -p "$target"
built=$target/ceph18.json
scripts/test.py --build-only "$built"
rust=$(rustc --print sysroot)
cargo_home=${CARGO_HOME:-$HOME/.cargo}
environment=(env -i --default-signal=INT,QUIT PATH="$rust/bin:/usr/sbin:/usr/bin:/sbin:/bin" HOME=/root LC_ALL=C.UTF-8
    DEBIAN_FRONTEND=noninteractive CARGO_HOME="$cargo_home" CARGO_NET_OFFLINE=true)
[ -z "${TIDEPOOL_SEED:-}" ] || environment+=(TIDEPOOL_SEED="$TIDEPOOL_SEED")

if [ -z "$root" ] || [ ! -e "$root/$made" ]; then
    echo "ceph18: making a root of Debian 13"
    "$target/release/tidepool" lab root --release 18 "$scratch/root" &
    keeper=$! first=$!
    wait "$keeper" || { first=; fail "there is no root of Debian 13"; }
    first=
    touch "$scratch/root/$made"
    [ -z "$root" ] || mv "$scratch/root" "$root"
fi
root=${root:-$scratch/root}

# The root sees the repository, what is compiled, and Rust at the places that they have here. What
# it changes there is in memory and goes with the namespaces. The files of the tests are on a real
# file system: others do not tell a file from one that replaces it.
directories=("$PWD" "$rust" "$cargo_home")
[[ "$target/" == "$PWD/"* ]] || directories+=("$target")
mkdir -p "$cargo_home" "$target/tmp" "$scratch/files"
# shellcheck disable=SC2016
start_apart '
    root=$1
    files=$2
    tests=$3
    shift 3
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"
    mkdir -p "$root/mnt/changes"
    mount -t tmpfs changes "$root/mnt/changes"
    for directory in "$@"; do
        changes=$root/mnt/changes/${directory//\//-}
        mkdir -p "$root$directory" "$changes" "$changes.work"
        mount -t overlay overlay -o "lowerdir=$directory,upperdir=$changes,workdir=$changes.work" "$root$directory"
    done
    mount --bind "$files" "$root$tests"
    cd "$root"
    pivot_root . .
    umount -l .
    cd /
    echo done >&3
    exec 3>&-
    # The shell reaps the orphans.
    sleep infinity &
    wait
' "$root" "$scratch/files" "$target/tmp" "${directories[@]}"
await_word || fail "the namespaces for $root cannot be made: $(tail -n 1 "$scratch/said")"

echo "ceph18: installing what the tests need"
interruptible inside env -C "$PWD" sh -c 'dpkg --configure -a && scripts/deps.sh test' >"$scratch/said" 2>&1 ||
    fail "what the tests need cannot be installed: $(tail -n 1 "$scratch/said")"
interruptible inside ceph --version

inside env -C "$PWD" scripts/test.py --built "$built" --programs "$programs" --all-must-run &
wait $!

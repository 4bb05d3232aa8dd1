#!/bin/bash
# The tests of the stale-image guard on Ceph 18: in a minimal root of Debian 13 that is made for it, with Debian's packages.
#   scripts/ceph18.sh             makes the root, runs the tests in it, removes it
#   ROOT=DIR scripts/ceph18.sh    leaves it in DIR, and uses it again when it is there
# Arguments go to the test program: scripts/ceph18.sh g6_no_client
# Needs root (debootstrap, chroot, mounts) and about 2 GB in /var/tmp. Packages come from the mirror that this machine's apt uses.
set -euo pipefail
cd "$(dirname "$0")/.."

suite=trixie
packages="ceph-mon ceph-mgr ceph-osd ceph-base ceph-common librbd1 librados2 qemu-utils qemu-block-extra
    qemu-system-x86 busybox-static kmod xz-utils"

if [ "$(id -u)" != 0 ]; then
    echo "ceph18: this needs root, to make a root directory of Debian 13 and to run programs in it; as root: make guard18" >&2
    exit 1
fi
if ! command -v debootstrap >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends debootstrap debian-archive-keyring >/dev/null
fi

# What is to run there is built here: programs built on Debian 12 run on 13.
built() {
    local kind=$1
    shift
    cargo "$@" --release --locked --message-format=json | grep -F "\"kind\":[\"$kind\"]" |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
}
program=$(built bin build --package tidepool)
tests=$(built test test --no-run --package tidepool-tests --test guard)

if [ -n "${ROOT:-}" ]; then
    root=$ROOT
    mkdir -p "$root"
else
    root=$(mktemp -d "${TMPDIR:-/var/tmp}/tidepool-ceph18-XXXXXX")
    chmod 755 "$root"
    trap 'exit 130' INT
    trap 'exit 143' TERM
    # Whatever is mounted in it is mounted in a namespace that has ended by now.
    trap 'rm -rf --one-file-system "$root" "$root.log"' EXIT
fi

# Runs a command in the root, with its own mounts and processes: they end with it, also when it is interrupted.
inside() {
    # shellcheck disable=SC2016
    unshare --mount --propagation private --pid --fork --kill-child sh -c '
        root=$1; shift
        mount -t proc proc "$root/proc" && mount --rbind /sys "$root/sys" && mount --rbind /dev "$root/dev" &&
        exec chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
            TIDEPOOL_BIN=/opt/tidepool/tidepool "$@"' sh "$root" "$@"
}

if [ ! -e "$root/opt/tidepool/made" ]; then
    # shellcheck disable=SC2016
    mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' |
        awk '$1 == "Debian" && $2 !~ /security/ { print $2; exit }')
    if [ -z "$mirror" ]; then
        echo "ceph18: no Debian mirror in this machine's apt sources (run apt-get update first)" >&2
        exit 1
    fi
    echo "ceph18: a root of Debian $suite in $root"
    # It mounts things too.
    unshare --mount --propagation private debootstrap --variant=minbase "$suite" "$root" "$mirror" >"$root.log" 2>&1 ||
        { tail -n 5 "$root.log" >&2; exit 1; }
    rm -f "$root.log"
    cp /etc/resolv.conf /etc/hosts "$root/etc/"
    apt-config dump | grep -i '^Acquire::.*Proxy' >"$root/etc/apt/apt.conf.d/99proxy" || true
    # Nothing that is installed is to be started.
    printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
    chmod 755 "$root/usr/sbin/policy-rc.d"
    echo "ceph18: installing Ceph and QEMU in it"
    inside apt-get update -qq
    # shellcheck disable=SC2086
    inside apt-get install -y -qq --no-install-recommends $packages >/dev/null
    inside apt-get clean
    mkdir -p "$root/opt/tidepool"
    touch "$root/opt/tidepool/made"
fi

cp "$program" "$root/opt/tidepool/tidepool"
cp "$tests" "$root/opt/tidepool/guard"
inside ceph --version
inside /opt/tidepool/guard --nocapture --include-ignored "$@"

#!/bin/bash
# Installs what a target of the Makefile needs, on Debian 12 and 13. scripts/deps.sh demo a C
# linker; nothing else scripts/deps.sh test also Ceph, QEMU, fio, libnbd's tools, a PostgreSQL and a
# kernel for guests Installs only what is missing, as root or with sudo. Without either it says what
# is missing and fails.
set -eu

demo="gcc libc6-dev make"
test="$demo ceph-mon ceph-mgr ceph-osd ceph-common librbd1 librados2 fio tgt tgt-rbd qemu-utils qemu-system-x86 qemu-block-extra
    libnbd-bin python3-libnbd nbdkit busybox-static cpio e2fsprogs fuse3 iproute2 kmod mount openssl procps xz-utils python3 linux-image-cloud-amd64
    postgresql systemd binutils dmsetup nbd-client fdisk xfsprogs btrfs-progs shellcheck
    user-mode-linux qemu-system-common bcache-tools util-linux debootstrap"

case ${1:-} in
    demo) wanted=$demo ;;
    test) wanted=$test ;;
    *) sed -n '2,5p' "$0"; exit 2 ;;
esac

if ! command -v cargo >/dev/null; then
    echo "deps: cargo is missing: install Rust (rustup, stable) first" >&2
    exit 1
fi
if ! command -v dpkg-query >/dev/null; then
    echo "deps: not a Debian system; these packages are needed: $wanted" >&2
    exit 0
fi
missing=
for package in $wanted; do
    # Any version does, also one that is not Debian's.
    [ "$package" = postgresql ] && ls /usr/lib/postgresql/*/bin/pg_amcheck >/dev/null 2>&1 && continue
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ]; then
    as_root=
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root=sudo
else
    echo "deps: these packages are missing, and this is neither root nor a user with sudo:$missing" >&2
    exit 1
fi
# What has to be undone when the script ends, however that is: a word for each.
undo=
policy=/usr/sbin/policy-rc.d
mask=/run/systemd/system/tgt.service
conf=/etc/postgresql-common/createcluster.d
clean() {
    for what in $undo; do
        case $what in
            policy) $as_root rm -f $policy ;;
            mask) $as_root rm -f $mask && $as_root systemctl daemon-reload ;;
            postgresql) $as_root rm -f $conf/tidepool.conf && $as_root rmdir --ignore-fail-on-non-empty $conf ;;
        esac
    done
}
trap clean EXIT
there() { [ -e "$1" ] || [ -L "$1" ]; }

case "$missing " in *" postgresql "*)
    # With its server Debian also makes a database and starts it. The tests want the programs only,
    # so a line of configuration keeps it from that while the package is installed, and goes again:
    # what the user installs or makes later is as always.
    undo="$undo postgresql"
    $as_root mkdir -p $conf
    echo "create_main_cluster = false" | $as_root tee $conf/tidepool.conf >/dev/null
esac
case "$missing " in *" tgt "*)
    # Debian starts a target that all may reach. The tests start targets of their own, so this one
    # stays off: a policy for this service alone keeps it from being started while it is installed;
    # where there is a policy of somebody else's, a mask until the next boot does.
    if ! there $policy || grep -qs "^# tidepool$" $policy; then
        undo="$undo policy"
        # shellcheck disable=SC2016
        printf '#!/bin/sh\n# tidepool\nfor word; do [ "${word%%%%.service}" != tgt ] || exit 101; done\n' | $as_root tee $policy >/dev/null
        $as_root chmod 755 $policy
    elif [ -d "${mask%/*}" ] && ! there $mask; then
        undo="$undo mask"
        $as_root ln -s /dev/null $mask
        $as_root systemctl daemon-reload
    fi
esac
echo "deps: installing$missing"
$as_root apt-get update -qq
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
case "$missing " in *" tgt "*)
    # Nor at the next boot; `systemctl enable --now tgt` has it.
    ! command -v systemctl >/dev/null || $as_root systemctl --quiet disable tgt.service >/dev/null 2>&1 ||
        echo "deps: tgt's service starts at the next boot: systemctl disable tgt" >&2
esac

//! docs/operations.md as somebody lives it who runs Tidepool: every command runs as it stands
//! there, on a real cluster, after what it is for has happened. The virtual machine is QEMU's NBD
//! client, and a file keeps what it has written.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use tidepool_testkit::{Cluster, ClusterOptions, daemon, need, one_at_a_time};
use tidepool_tests::document::{Host, commands, repository};
use tidepool_tests::rig::MIB;

/// Size of the image.
const IMAGE_BYTES: u64 = 64 * MIB;

/// Does with the unit's command what systemd does, as far as the document wants it.
const SYSTEMCTL: &str = r#"#!/bin/bash
set -euo pipefail
pid=/run/tidepool.pid
stop() {
    [ -e $pid ] || return 0
    kill "$(cat $pid)"
    while [ -e "/proc/$(cat $pid)" ]; do sleep 0.1; done
    rm $pid
}
start() {
    command=$(sed -n 's|^ExecStart=/usr/bin/||p' packaging/tidepool.service)
    mkdir -p /run/tidepool /var/lib/tidepool
    : >/run/tidepool.ready
    setsid ${command//\/etc\/tidepool/$ETC} >/run/tidepool.ready 2>>/run/tidepool.log &
    echo $! >$pid
    until grep -q ready /run/tidepool.ready; do [ -e "/proc/$(cat $pid)" ]; sleep 0.1; done
}
case $* in
    "start tidepool") start ;;
    "stop tidepool" | "disable --now tidepool") stop ;;
    "restart tidepool") stop; start ;;
    *) exit 1 ;;
esac
"#;

/// What the script needs beside the document's commands.
const HELPERS: &str = r#"
socket=/run/tidepool/nbd.sock
both() {
    qemu-io -f raw "$@" "nbd+unix:///vm1?socket=$socket"
    qemu-io -f raw "$@" /mnt/model
}
status_shows() {
    for _ in $(seq 600); do
        [[ $(tidepool status --format json) =~ $1 ]] && return
        sleep 0.1
    done
    echo "the status never shows $1"
    return 1
}
vm_has_written() {
    for _ in $(seq 600); do
        grep -q ^wrote /run/vm.log && return
        sleep 0.1
    done
    echo "the VM does not write: $(cat /run/vm.log)"
    return 1
}
image_is_right() { rbd export --no-progress rbd/vm1 - | cmp - /mnt/model; }
killed() {
    kill -9 "$(cat /run/tidepool.pid)"
    while [ -e "/proc/$(cat /run/tidepool.pid)" ]; do sleep 0.1; done
    rm /run/tidepool.pid
}
"#;

/// A document whose sections are used up one after the other.
struct Manual {
    text: String,
    used: usize,
}

impl Manual {
    /// The blocks of a section, of which there are as many as the test knows.
    fn section<const N: usize>(&mut self, heading: &str) -> [String; N] {
        self.used += N;
        let blocks = commands(&self.text, heading);
        blocks.try_into().unwrap_or_else(|blocks| {
            panic!("{heading}: {N} blocks are known, these stand there: {blocks:?}")
        })
    }
}

/// Every section, each after what it is for.
fn live(host: &mut Host, manual: &mut Manual) {
    let [status] = manual.section("## Is all well");
    host.act("both -c 'write -P 1 0 8M' -c flush");
    host.follow(&status);

    let [look, more, room] = manual.section("## Ceph is full");
    host.act("ceph osd pool set-quota rbd max_bytes 4096");
    host.act("until [[ $(tidepool status) == *'backend is full'* ]]; do both -c 'write -P 2 8M 64k' -c flush; done >/dev/null");
    host.follow(&look);
    host.follow(&more);
    host.act("both -c 'write -P 3 9M 8M' -c flush");
    host.follow(&room);
    host.act("image_is_right");

    let [who] = manual.section("## Who has given");
    host.follow(&who);
    host.act("grep -q 'volume set vm1 --dirty-max' /var/lib/tidepool/audit.log");

    let [why, forget] = manual.section("## A volume is not served");
    host.act("cp $ETC/tidepool.toml /mnt/tidepool.toml; printf '[volume.vm2]\\nbackend = \"rbd:rbd/vm2\"\\n' >>$ETC/tidepool.toml; systemctl restart tidepool");
    host.act("qemu-io -f raw -c 'read -P 1 0 1M' \"nbd+unix:///vm1?socket=$socket\"");
    host.follow(&why);
    host.act("status_shows '\"state\": ?\"unavailable\"'; rbd create --size 64M rbd/vm2");
    host.act("for _ in $(seq 600); do qemu-io -f raw -c 'read 0 1M' \"nbd+unix:///vm2?socket=$socket\" && break; sleep 0.1; done 2>/dev/null; tidepool volume drain vm2");
    host.act("tidepool volume remove vm2; rbd rm --no-progress rbd/vm2; systemctl restart tidepool; status_shows '\"state\": ?\"unavailable\"'");
    host.follow(&forget);
    host.act("cp /mnt/tidepool.toml $ETC/tidepool.toml; systemctl restart tidepool; [[ ! $(tidepool status --format json) =~ vm2 ]]; both -c 'read 0 64k'");

    let [cost, save, give_up] = manual.section("## An image is gone for good");
    host.act("ceph osd pool create doomed 1; rbd pool init doomed; rbd create --size 64M doomed/vm2; tidepool volume add vm2=rbd:doomed/vm2 --accept-loss 10s");
    host.act("both -c 'write -P 12 10M 1M' -c flush; qemu-io -f raw -c 'write -P 9 0 4M' -c flush \"nbd+unix:///vm2?socket=$socket\"; killed");
    host.act("ceph osd pool delete doomed doomed --yes-i-really-really-mean-it; systemctl start tidepool; status_shows '\"state\": ?\"unavailable\"'");
    host.follow_failing(&cost, 1);
    host.follow(&save);
    host.act("[ -s /mnt/vm2.dirty ]");
    host.follow(&give_up);
    host.act("[[ ! $(tidepool volume list --format json) =~ vm2 ]]; both -c 'read -P 12 10M 1M'; tidepool volume drain vm1; image_is_right");

    let [backup] = manual.section("## Backup");
    host.act("both -c 'write -P 4 20M 8M' -c flush");
    host.follow(&backup);
    host.act("cmp /mnt/vm1.raw /mnt/model");

    let [whole, difference, clone, forget] = manual.section("## Snapshots: a rotation");
    host.act("both -c 'write -P 12 40M 8M' -c flush");
    host.follow(&whole);
    host.act(
        "cmp /mnt/day1.raw /mnt/model; both -c 'write -P 13 44M 8M' -c 'discard 60M 1M' -c flush",
    );
    host.follow(&difference);
    host.act("[ \"$(rbd snap ls rbd/vm1 | awk 'NR > 1 { print $2 }')\" = day2 ]");
    host.act("rbd import --no-progress /mnt/day1.raw rbd/again; rbd snap create --no-progress rbd/again@day1; rbd import-diff --no-progress /mnt/day2.diff rbd/again");
    host.act("rbd export --no-progress rbd/again - | cmp - /mnt/model; rbd snap purge --no-progress rbd/again; rbd rm --no-progress rbd/again");
    host.follow(&clone);
    host.act("rbd export --no-progress rbd/copy - | cmp - /mnt/model; if tidepool volume snap rm vm1 day2; then false; fi");
    host.follow(&forget);
    host.act("[ -z \"$(rbd snap ls rbd/vm1)\" ]");

    let [keep, back] = manual.section("## Going back");
    host.act("both -c 'write -P 14 20M 8M' -c flush");
    host.follow(&keep);
    host.act("qemu-io -f raw -c 'write -P 15 16M 8M' -c 'write -P 15 60M 1M' -c flush \"nbd+unix:///vm1?socket=$socket\"");
    host.follow(&back);
    host.act("qemu-img compare -f raw -F raw \"nbd+unix:///vm1?socket=$socket\" /mnt/model; image_is_right; [ -z \"$(rbd snap ls rbd/vm1)\" ]");

    let [upgrade] = manual.section("## Upgrading");
    host.act(
        "options=driver=nbd,server.type=unix,server.path=$socket,export=vm1,reconnect-delay=60\n\
         stdbuf -oL qemu-io --image-opts $options -c 'write -P 5 1M 1M' -c 'sleep 3000' -c 'write -P 6 3M 1M' -c flush >/run/vm.log 2>&1 &\n\
         vm=$!; vm_has_written",
    );
    host.follow(&upgrade);
    host.act("wait $vm || { cat /run/vm.log; false; }; qemu-io -f raw -c 'write -P 5 1M 1M' -c 'write -P 6 3M 1M' /mnt/model");

    let [back] = manual.section("## The host died");
    host.act("both -c 'write -P 7 30M 8M' -c flush; killed");
    host.follow(&back);
    host.act("status_shows '\"state\": ?\"serving\"'; tidepool volume drain vm1; image_is_right");
    host.act("systemctl restart tidepool; both -c 'read -P 7 30M 8M'");

    let [look, recover, again] = manual.section("## The cache SSD died");
    let [fences, end_fence] = manual.section("## A fence that outlives");
    host.act("both -c 'write -P 8 40M 1M' -c flush; tidepool volume drain vm1");
    host.act("qemu-io -f raw -c 'write -P 9 50M 4M' \"nbd+unix:///vm1?socket=$socket\"; killed; rm /var/lib/tidepool/cache");
    host.follow_failing(&look, 2);
    host.follow(&recover);
    // What was written last may be lost, nothing else is.
    host.act("rbd export --no-progress rbd/vm1 - >/mnt/exact; cmp -n $((50 << 20)) /mnt/exact /mnt/model; cp /mnt/exact /mnt/model");
    // An open on a host that nobody knows any more was cut short, and what it has left is given up.
    host.act("id=$(rbd info rbd/vm1 | sed -n 's/^[[:space:]]*id: //p'); rados -p rbd get tidepool_owner.$id /mnt/record");
    host.act("sed -i '1 s|^{|{\"claims\": [\"10.0.0.7:0/3271881406\"],|' /mnt/record; rados -p rbd put tidepool_owner.$id /mnt/record");
    host.act("tidepool recover rbd:rbd/vm1 --accept-loss");
    host.follow(&again);

    // It is served here, which a dry run says as well.
    host.follow_failing(&fences, 1);
    host.act("told() { tidepool check rbd:rbd/vm1 || true; }; [[ $(told) == *'10.0.0.7:0/3271881406 of an unknown host'* ]]");
    host.follow(&end_fence);
    host.act("[[ $(told) != *10.0.0.7* ]]; rados -p rbd get tidepool_owner.$id - | grep 10.0.0.7");
    host.act("systemctl restart tidepool; status_shows '\"state\": ?\"serving\"'; [[ $(rados -p rbd get tidepool_owner.$id -) != *10.0.0.7* ]]");

    let [authority, certificate, fingerprint] = manual.section("## Second copies");
    host.follow(&authority);
    host.follow(&certificate);
    host.act("openssl verify -CAfile /var/lib/tidepool/tls/ca.pem /var/lib/tidepool/tls/cert.pem");
    host.follow(&fingerprint);
    host.act("grep -Eq '^[0-9a-f]{64} ' /mnt/ca/h1.revoked");

    let [leave, arrive] = manual.section("## Moving");
    host.act("both -c 'write -P 10 50M 4M' -c flush");
    host.follow(&leave);
    host.act("systemctl restart tidepool; [ \"$(tidepool volume list --format json)\" = '[]' ]");
    host.act("systemctl stop tidepool; mv /var/lib/tidepool /var/lib/other-host; systemctl start tidepool");
    host.follow(&arrive);
    host.act("qemu-img compare -f raw -F raw \"nbd+unix:///vm1?socket=$socket\" /mnt/model");
    host.act("systemctl restart tidepool; qemu-img compare -f raw -F raw \"nbd+unix:///vm1?socket=$socket\" /mnt/model");

    let [remove, end] = manual.section("## Migrating off");
    host.act("both -c 'write -P 11 0 1M' -c flush");
    host.follow(&remove);
    host.act("image_is_right; rbd bench --io-type write --io-total 4K rbd/vm1");
    host.act("systemctl restart tidepool; [ \"$(tidepool volume list --format json)\" = '[]' ]");
    host.follow(&end);
}

#[test]
fn the_commands_of_the_manual_work_as_they_stand_there() {
    let _turn = one_at_a_time();
    need("qemu-io", "qemu-utils").expect("installed");
    let text = fs::read_to_string(repository().join("docs/operations.md")).expect("the document");
    // A dead client is forgotten sooner than by default, and a full pool noticed sooner.
    let extra = [
        "osd client watch timeout = 8",
        "mon tick interval = 1",
        "mgr tick period = 1",
        "mon allow pool delete = true",
    ];
    let extra = extra.map(str::to_owned).to_vec();
    let cluster =
        Cluster::up(&ClusterOptions { extra, manager: true, ..ClusterOptions::for_tests() })
            .expect("a cluster");
    cluster.rbd_create("vm1", IMAGE_BYTES).expect("the VM's image");

    let mut host = Host::new("operations", &["/run", "/var/lib", "/mnt"]);
    for directory in ["bin", "etc"] {
        fs::create_dir(host.scratch.join(directory)).expect("a directory");
    }
    let systemctl = host.scratch.join("bin/systemctl");
    fs::write(&systemctl, SYSTEMCTL).expect("write");
    fs::set_permissions(&systemctl, fs::Permissions::from_mode(0o755)).expect("executable");
    let config = fs::read_to_string(repository().join("packaging/tidepool.toml"))
        .expect("the configuration");
    // A small cache, and no port that somebody else may use.
    let config = config.replace("\"64GiB\"", "\"256MiB\"").replace("\nmetrics", "\n#metrics");
    fs::write(host.scratch.join("etc/tidepool.toml"), config).expect("write");

    host.act(HELPERS);
    host.act(&format!("truncate -s {IMAGE_BYTES} /mnt/model; systemctl start tidepool"));
    host.act("tidepool volume add vm1=rbd:rbd/vm1 --accept-loss 10s");
    let mut manual = Manual { text, used: 0 };
    live(&mut host, &mut manual);
    assert_eq!(
        manual.used,
        manual.text.matches("```sh\n").count(),
        "every block of the document runs"
    );

    let mut path = OsString::from(host.scratch.join("bin"));
    let program = daemon::tidepool().expect("the program").parent().expect("its directory");
    for part in [program.into(), std::env::var_os("PATH").expect("a path")] {
        path.push(":");
        path.push(part);
    }
    let etc = host.scratch.join("etc").into_os_string();
    let log = host.run(&cluster, &[("PATH", path), ("ETC", etc)]);
    println!("{log}");
}

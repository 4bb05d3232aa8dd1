//! The configuration, the keys and the monitor store of a new cluster.

use std::fmt::Write;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{ClusterError, ClusterOptions, io, run};
use crate::network::{Namespace, Network};

/// Memory target of each OSD in bytes: clusters run on small machines, too.
const OSD_MEMORY_BYTES: u64 = 896 << 20;

/// The monitor proposes changes at once, not once a second. The state of placement groups is known
/// after one second, not five. A dead client is forgotten after ten seconds, not thirty.
const PROMPT: &str = "paxos propose interval = 0.05
mgr stats period = 1
mgr tick period = 1
osd client watch timeout = 10
";

/// Where the daemons of a new cluster are.
pub(super) struct Place<'a> {
    /// The network namespace of the monitor; `None` for that of this process.
    pub(super) inside: Option<&'a Namespace>,
    /// Addresses and ports of the monitor.
    monitor: String,
    /// The network of daemons and clients.
    network: String,
}

impl Place<'_> {
    /// The place of a cluster in a network, or on the loopback interface.
    pub(super) fn new(network: Option<&Network>, port: u16) -> Place<'_> {
        let address = network.map_or(Ipv4Addr::LOCALHOST, |network| network.monitor().address());
        Place {
            inside: network.map(|network| network.monitor().namespace()),
            monitor: format!("[v2:{address}:{},v1:{address}:{port}]", port + 1),
            network: network.map_or_else(|| "127.0.0.0/8".into(), Network::subnet),
        }
    }
}

/// Writes ceph.conf and returns its path.
pub(super) fn write(
    dir: &Path,
    options: &ClusterOptions,
    fsid: &str,
    place: &Place<'_>,
) -> Result<PathBuf, ClusterError> {
    let path = dir.join("ceph.conf");
    let mut text = text(dir, options, fsid, place);
    if let Some(classes) = class_dir() {
        // Some builds search the object classes relative to the directory in which the OSD was
        // started.
        let _ = writeln!(text, "osd class dir = {}", classes.display());
    }
    for line in &options.extra {
        let _ = writeln!(text, "{line}");
    }
    for (number, store) in (0..).zip(&options.stores) {
        text.push_str(&store.section(number));
        if options.guests.contains_key(&number) {
            text.push_str(&in_guest(number));
        }
        text.extend(options.servers.as_ref().map(|servers| servers.location(number)));
    }
    fs::write(&path, text).map_err(io(format!("cannot write {}", path.display())))?;
    Ok(path)
}

/// The part of the configuration that does not depend on the machine.
fn text(dir: &Path, options: &ClusterOptions, fsid: &str, place: &Place<'_>) -> String {
    let dir = dir.display();
    let auth = if options.cephx { "cephx" } else { "none" };
    let replicas = options.replicas;
    let prompt = if options.prompt { PROMPT } else { "" };
    let Place { monitor, network, .. } = place;
    // Copies are on different servers if there are enough servers, else on different OSDs.
    let osds = options.stores.len() as u32;
    let domain =
        u32::from(options.servers.as_ref().is_some_and(|servers| servers.separate(osds, replicas)));
    format!(
        "[global]
fsid = {fsid}
mon host = {monitor}
public network = {network}
ms bind ipv6 = false
auth cluster required = {auth}
auth service required = {auth}
auth client required = {auth}
auth allow insecure global id reclaim = false
osd pool default size = {replicas}
osd pool default min size = 1
osd crush chooseleaf type = {domain}
mon allow pool size one = true
mon allow pool delete = true
mon warn on pool no redundancy = false
mon data avail warn = 2
run dir = {dir}
pid file = {dir}/$name.pid
admin socket = {dir}/$name.$pid.asok
log file = {dir}/$name.log
mon data = {dir}/mon
mgr data = {dir}/mgr
mgr module path = {dir}/modules
osd data = {dir}/osd$id
keyring = {dir}/keyring
osd memory target = {OSD_MEMORY_BYTES}
{prompt}"
    )
}

/// The path of the admin socket of an OSD in a guest. A socket in a directory of the machine would
/// lead nowhere from outside the guest.
pub(super) fn guest_socket(number: u32) -> PathBuf {
    format!("/run/osd.{number}.asok").into()
}

/// The settings of an OSD in a guest, besides those of its store. The OSD's database is not in the
/// page cache of the guest; nor is it in that of this machine where the disks are files of emulated
/// devices.
fn in_guest(number: u32) -> String {
    format!("admin socket = {}\nbluefs buffered io = false\n", guest_socket(number).display())
}

/// The settings for clients of a cluster that was joined, with files in `dir`.
pub(super) fn joined(dir: &Path, pool: &str) -> String {
    let dir = dir.display();
    format!(
        "
[client]
rbd default pool = {pool}
keyring = {dir}/keyring
admin socket = {dir}/$name.$pid.asok
log file = {dir}/$name.log
"
    )
}

/// The value of a setting in a configuration that [`write`] has written: the first one in any
/// section.
pub(super) fn setting<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "))
}

/// Makes the keyring for the monitor, the manager, the OSDs and the administrator.
pub(super) fn keys(conf: &Path, dir: &Path, options: &ClusterOptions) -> Result<(), ClusterError> {
    let keyring = dir.join("keyring");
    run(Command::new("ceph-authtool").arg("-c").arg(conf).arg("--create-keyring").arg(&keyring))?;
    let mut entities = vec![
        ("mon.".to_string(), vec![("mon", "allow *")]),
        (
            "client.admin".to_string(),
            vec![("mon", "allow *"), ("osd", "allow *"), ("mgr", "allow *")],
        ),
        ("mgr.x".to_string(), vec![("mon", "allow profile mgr"), ("osd", "allow *")]),
    ];
    for number in 0..options.stores.len() {
        let capabilities =
            vec![("mon", "allow profile osd"), ("mgr", "allow profile osd"), ("osd", "allow *")];
        entities.push((format!("osd.{number}"), capabilities));
    }
    for (entity, capabilities) in entities {
        let mut command = Command::new("ceph-authtool");
        command.arg("-c").arg(conf).arg(&keyring).args(["--gen-key", "-n", &entity]);
        for (service, capability) in capabilities {
            command.args(["--cap", service, capability]);
        }
        run(&mut command)?;
    }
    Ok(())
}

/// Makes the monitor's store.
pub(super) fn monitor_store(
    conf: &Path,
    dir: &Path,
    fsid: &str,
    place: &Place<'_>,
) -> Result<(), ClusterError> {
    for name in ["mon", "mgr"] {
        fs::create_dir(dir.join(name)).map_err(io(format!("cannot make the directory {name}")))?;
    }
    let map = dir.join("monmap");
    let address = &place.monitor;
    run(Command::new("monmaptool")
        .args(["--create", "--fsid", fsid, "--addv", "a", address])
        .arg(&map))?;
    let mut command = Command::new("ceph-mon");
    command.arg("-c").arg(conf).args(["--mkfs", "-i", "a", "--monmap"]).arg(&map);
    command.arg("--keyring").arg(dir.join("keyring"));
    // The monitor looks for its address among those of the interfaces.
    if let Some(namespace) = place.inside {
        namespace.enter(&mut command);
    }
    run(&mut command).map(drop)
}

/// The directory of the OSDs' object classes, as the distribution installs it.
fn class_dir() -> Option<PathBuf> {
    let multiarch =
        fs::read_dir("/usr/lib").ok()?.flatten().map(|entry| entry.path().join("rados-classes"));
    multiarch.chain([PathBuf::from("/usr/lib64/rados-classes")]).find(|path| path.is_dir())
}

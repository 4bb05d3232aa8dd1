//! The iSCSI gateway: one `tgtd` on the monitor's machine with a target for each image.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Access, AccessError, Image, Site, failed, librbd};
use tidepool_cluster::process::{self, Process};

const PROGRAM: &str = "tgtd";
/// Paths of tgt's backing store for RBD images, as packages install it.
const RBD_STORE: [&str; 2] =
    ["/usr/lib/tgt/backing-store/bs_rbd.so", "/usr/lib64/tgt/backing-store/bs_rbd.so"];
/// Prefix of the names of the gateway's files.
const NAME: &str = "gateway";
/// The TCP port of iSCSI.
const PORT: u16 = 3260;
/// Prefix of the names of targets.
const TARGETS: &str = "iqn.2026-11.tidepool.lab";
/// The number of the logical unit that is the image in its target. Unit 0 is the target's
/// controller.
pub(super) const UNIT: u32 = 1;
/// Longest wait for the answer to a command, in seconds.
const ANSWER_LIMIT_S: u32 = 60;
/// Longest wait for the gateway to take commands, and for its end.
const LIMIT: Duration = Duration::from_secs(60);
/// Pause between two attempts to send the first command.
const POLL: Duration = Duration::from_millis(20);

/// Where targets keep their data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Store {
    /// In images, through librbd.
    Rbd,
    /// Nowhere: all requests are answered at once, and nothing is kept.
    Null,
}

impl Store {
    /// tgt's name of the store.
    fn name(self) -> &'static str {
        match self {
            Store::Rbd => "rbd",
            Store::Null => "null",
        }
    }
}

/// Checks whether there can be a gateway on this machine. The error is the reason why not, in one
/// line.
pub(super) fn probe() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("tgtd takes commands from root only".into());
    }
    process::need(PROGRAM, "tgt tgt-rbd")?;
    process::need("tgtadm", "tgt tgt-rbd")?;
    if RBD_STORE.iter().any(|path| Path::new(path).exists()) {
        return Ok(());
    }
    Err("tgt has no store for RBD images; on Debian: apt-get install tgt-rbd".into())
}

/// A running gateway. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Gateway {
    process: Process,
    store: Store,
    directory: PathBuf,
    control: PathBuf,
    log: PathBuf,
    portal: SocketAddrV4,
    images: Vec<Image>,
}

impl Gateway {
    /// Starts a gateway with a target for each image.
    pub(super) fn start(site: &Site, store: Store) -> Result<Gateway, AccessError> {
        let conf = librbd::conf(&site.conf, &site.directory, NAME)?;
        let [control, log] =
            ["control", "log"].map(|what| site.directory.join(format!("{NAME}.{what}")));
        let portal = match &site.gateway {
            Some(node) => SocketAddrV4::new(node.address, PORT),
            None => free_portal().map_err(failed("cannot find a free port"))?,
        };
        let output =
            File::create(&log).map_err(failed(format!("cannot make {}", log.display())))?;
        let errors =
            output.try_clone().map_err(failed(format!("cannot open {}", log.display())))?;
        let mut command = Command::new(PROGRAM);
        command.args(["-f", "--iscsi"]).arg(format!("portal={portal}"));
        command.env("TGT_IPC_SOCKET", &control).env("CEPH_CONF", &conf);
        command.current_dir(&site.directory).stdin(Stdio::null()).stdout(output).stderr(errors);
        site.gateway.iter().for_each(|node| node.namespace.enter(&mut command));
        let process = Process::spawn(command).map_err(failed(format!("cannot run {PROGRAM}")))?;
        let (directory, images) = (site.directory.clone(), site.images.clone());
        let gateway = Gateway { process, store, directory, control, log, portal, images };
        gateway.wait()?;
        for (number, image) in (1..).zip(&gateway.images) {
            gateway.offer(number, image)?;
        }
        Ok(gateway)
    }

    /// Waits until the gateway takes commands.
    fn wait(&self) -> Result<(), AccessError> {
        let start = Instant::now();
        loop {
            let Err(error) = self.tell(&["--mode", "target", "--op", "show"]) else {
                return Ok(());
            };
            self.holds()?;
            if start.elapsed() > LIMIT {
                return Err(error);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Makes the target of an image.
    fn offer(&self, number: u32, image: &Image) -> Result<(), AccessError> {
        let (number, unit, store) = (number.to_string(), UNIT.to_string(), self.store.name());
        let (name, backing) = (name(image), backing(image));
        self.tell(&["--mode", "target", "--op", "new", "--tid", &number, "--targetname", &name])?;
        let unit = ["--mode", "logicalunit", "--op", "new", "--tid", &number, "--lun", &unit];
        self.tell(&[&unit[..], &["--bstype", store, "--backing-store", &backing]].concat())?;
        let words =
            ["--mode", "target", "--op", "bind", "--tid", &number, "--initiator-address", "ALL"];
        self.tell(&words).map(drop)
    }

    /// Sends a command to the gateway; returns its output.
    fn tell(&self, words: &[&str]) -> Result<String, AccessError> {
        let mut command = Command::new("timeout");
        command
            .arg(ANSWER_LIMIT_S.to_string())
            .arg("tgtadm")
            .args(words)
            .env("TGT_IPC_SOCKET", &self.control);
        let line = format!("tgtadm {}", words.join(" "));
        let output = command
            .stdin(Stdio::null())
            .output()
            .map_err(failed(format!("cannot run `{line}`")))?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
        Err(AccessError::Command {
            command: line,
            output: format!("{said}; its log: {}", self.last_words()),
        })
    }

    /// The last line of the gateway's log.
    fn last_words(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        log.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("nothing").to_string()
    }

    /// The gateway's address and port.
    pub(super) fn portal(&self) -> SocketAddrV4 {
        self.portal
    }

    /// The counters of librbd in the gateway.
    pub(super) fn counted(&self) -> Result<librbd::Counted, AccessError> {
        librbd::Counted::now(&self.directory, NAME, &[self.process.id()])
    }

    /// Proves that each image has its target, and that each target has an initiator on the image's
    /// hypervisor.
    pub(super) fn verify(&self) -> Result<Value, AccessError> {
        let targets = read_targets(&self.tell(&["--mode", "target", "--op", "show"])?);
        for image in &self.images {
            let (name, wanted) = (name(image), [self.store.name().to_string(), backing(image)]);
            let target = targets.iter().find(|target| target.name == name);
            let Some(target) = target.filter(|target| target.stores.contains(&wanted)) else {
                return Err(not(format!("there is no target {name} with {}", wanted.join(" "))));
            };
            let address =
                image.node.as_ref().map_or(Ipv4Addr::LOCALHOST, |node| node.address).to_string();
            if !target.initiators.contains(&address) {
                return Err(not(format!(
                    "{name} has no initiator at {address}, but {:?}",
                    target.initiators
                )));
            }
        }
        let targets = targets.iter().map(
            |target| json!({ "name": target.name, "stores": target.stores, "initiators": target.initiators }),
        );
        Ok(json!({ "portal": self.portal.to_string(), "targets": targets.collect::<Vec<_>>() }))
    }

    /// Proves that the gateway still runs.
    pub(super) fn holds(&self) -> Result<(), AccessError> {
        match self.process.ended().map_err(failed(format!("cannot look at {PROGRAM}")))? {
            None => Ok(()),
            Some(how) => {
                Err(not(format!("{PROGRAM} has ended ({how}); its log: {}", self.last_words())))
            }
        }
    }

    /// Closes all images, and ends the gateway. If it were killed, its images would stay open for
    /// half a minute.
    pub(super) fn stop(mut self) -> Result<(), AccessError> {
        for number in 1..=self.images.len() {
            self.tell(&[
                "--mode",
                "target",
                "--op",
                "delete",
                "--force",
                "--tid",
                &number.to_string(),
            ])?;
        }
        self.tell(&["--mode", "system", "--op", "delete"])?;
        match self.process.wait(LIMIT).map_err(failed(format!("cannot wait for {PROGRAM}")))? {
            Some(_) => Ok(()),
            None => Err(failed(PROGRAM)(std::io::ErrorKind::TimedOut.into())),
        }
    }
}

/// The name of an image's target.
pub(super) fn name(image: &Image) -> String {
    format!("{TARGETS}:{}", image.name)
}

/// tgt's name of an image.
fn backing(image: &Image) -> String {
    format!("rbd/{}", image.name)
}

/// A port of the loopback interface that was free a moment ago.
fn free_portal() -> std::io::Result<SocketAddrV4> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(SocketAddrV4::new(Ipv4Addr::LOCALHOST, listener.local_addr()?.port()))
}

fn not(what: String) -> AccessError {
    AccessError::NotInPlace { access: Access::Iscsi, what }
}

/// A target, as tgtadm prints it.
#[derive(Debug, Default, PartialEq)]
struct Target {
    name: String,
    /// Type and path of the backing store of each of the target's units.
    stores: Vec<[String; 2]>,
    /// Addresses of the connected initiators.
    initiators: Vec<String>,
}

/// Parses the output of `tgtadm --mode target --op show`.
fn read_targets(text: &str) -> Vec<Target> {
    let mut targets: Vec<Target> = Vec::new();
    let mut kind = "";
    for line in text.lines() {
        let Some((what, value)) = line.trim().split_once(": ") else { continue };
        if what.starts_with("Target ") {
            targets.push(Target { name: value.into(), ..Target::default() });
        }
        let Some(target) = targets.last_mut() else { continue };
        match what {
            "IP Address" => target.initiators.push(value.into()),
            "Backing store type" => kind = value,
            "Backing store path" => target.stores.push([kind.into(), value.into()]),
            _ => {}
        }
    }
    targets
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOWN: &str = "Target 1: iqn.2026-11.tidepool.lab:img0
    System information:
        Driver: iscsi
        State: ready
    I_T nexus information:
        I_T nexus: 1
            Initiator: iqn.2026-11.tidepool.lab:host0 alias: none
            Connection: 0
                IP Address: 10.213.0.2
    LUN information:
        LUN: 0
            Type: controller
            Backing store type: null
            Backing store path: None
            Backing store flags: 
        LUN: 1
            Type: disk
            Backing store type: rbd
            Backing store path: rbd/img0
            Backing store flags: 
    Account information:
    ACL information:
        ALL
Target 2: iqn.2026-11.tidepool.lab:img1
    System information:
";

    #[test]
    fn targets_are_told_with_what_is_behind_them_and_who_is_connected() {
        let targets = read_targets(SHOWN);
        assert_eq!(targets.len(), 2);
        assert_eq!(targets[0].name, "iqn.2026-11.tidepool.lab:img0");
        assert_eq!(targets[0].initiators, ["10.213.0.2"]);
        assert!(targets[0].stores.contains(&["rbd".into(), "rbd/img0".into()]), "{targets:?}");
        assert_eq!((targets[1].stores.len(), targets[1].initiators.len()), (0, 0));
        assert_eq!(read_targets("tgtadm: can't connect\nIP Address: 1.2.3.4\n"), []);
    }

    #[test]
    fn a_free_port_is_one_of_the_loopback_interface() {
        let portal = free_portal().expect("a port");
        assert!(portal.ip().is_loopback() && portal.port() > 0);
    }
}

//! The daemons of a cluster: how they are started, stopped, continued and killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::json;

use super::librados::To;
use super::{Cluster, ClusterError, Store, config, io, last_lines, random_uuid, run};
use crate::guest::{PID, Prefix};
use crate::network::Namespace;
use crate::process::Process;

/// Longest run of one Ceph command in a guest, in seconds; guests are slower.
const GUEST_COMMAND_TIMEOUT_S: u32 = 180;

/// A daemon of Ceph that is to be started.
pub(super) struct Daemon<'a> {
    program: &'a str,
    id: &'a str,
    /// The node of the network that it runs on.
    node: Option<&'a Namespace>,
    /// How commands get into the guest that it runs in.
    guest: Option<Prefix>,
}

impl<'a> Daemon<'a> {
    /// The daemon `id` of this program, on this machine.
    pub(super) fn new(program: &'a str, id: &'a str) -> Daemon<'a> {
        Daemon { program, id, node: None, guest: None }
    }

    /// The daemon on a node of the network, if there is one.
    pub(super) fn on(self, node: Option<&'a Namespace>) -> Daemon<'a> {
        Daemon { node, ..self }
    }

    /// The daemon in a guest, if there is one.
    fn within(self, guest: Option<Prefix>) -> Daemon<'a> {
        Daemon { guest, ..self }
    }

    /// Starts the daemon in the foreground, with its output in a file of the cluster's directory.
    pub(super) fn start(self, conf: &Path, dir: &Path) -> Result<Process, ClusterError> {
        let Daemon { program, id, node, guest } = self;
        let name = program.trim_start_matches("ceph-");
        let log = fs::File::create(dir.join(format!("{name}.{id}.out")))
            .map_err(io("cannot make a log file"))?;
        let errors = log.try_clone().map_err(io("cannot make a log file"))?;
        let mut command =
            guest.map_or_else(|| Command::new(program), |guest| guest.command(program));
        command.arg("-f").arg("-c").arg(conf).args(["-i", id]).current_dir(dir);
        command.stdin(Stdio::null()).stdout(log).stderr(errors);
        if let Some(namespace) = node {
            namespace.enter(&mut command);
        }
        Process::spawn(command).map_err(io(format!("cannot start {program}")))
    }
}

impl Cluster {
    /// The admin sockets of the running OSDs.
    pub fn osd_sockets(&self) -> Vec<PathBuf> {
        let running = (0..)
            .zip(&self.osds)
            .filter_map(|(number, osd): (u32, _)| Some((number, osd.as_ref()?.id())));
        running.map(|(number, pid)| self.scratch.join(format!("osd.{number}.{pid}.asok"))).collect()
    }

    /// Stops OSD `number` (SIGSTOP): it answers nothing, and its connections stay open.
    pub fn osd_stop(&self, number: u32) -> Result<(), ClusterError> {
        self.osd(number)?.stop().map_err(io("cannot stop the OSD"))
    }

    /// Continues a stopped OSD (SIGCONT).
    pub fn osd_continue(&self, number: u32) -> Result<(), ClusterError> {
        self.osd(number)?.signal(Signal::CONT).map_err(io("cannot continue the OSD"))
    }

    /// Kills OSD `number` (SIGKILL).
    pub fn osd_kill(&mut self, number: u32) -> Result<(), ClusterError> {
        self.osd(number)?;
        // Dropping the process kills and reaps it.
        self.osds[number as usize] = None;
        Ok(())
    }

    /// Starts an OSD that was killed.
    pub fn osd_start(&mut self, number: u32) -> Result<(), ClusterError> {
        let slot = self.osds.get(number as usize).ok_or(ClusterError::NoOsd(number))?;
        if slot.is_none() {
            self.osds[number as usize] = Some(self.start_osd(number)?);
        }
        Ok(())
    }

    /// Stops the monitor (SIGSTOP).
    pub fn monitor_stop(&self) -> Result<(), ClusterError> {
        self.monitor()?.stop().map_err(io("cannot stop the monitor"))
    }

    /// Continues a stopped monitor (SIGCONT).
    pub fn monitor_continue(&self) -> Result<(), ClusterError> {
        self.monitor()?.signal(Signal::CONT).map_err(io("cannot continue the monitor"))
    }

    fn monitor(&self) -> Result<&Process, ClusterError> {
        self.monitor.as_ref().ok_or(ClusterError::Joined)
    }

    /// Checks that all OSDs that were started still run.
    ///
    /// # Errors
    /// An OSD has ended.
    pub fn check_osds(&self) -> Result<(), ClusterError> {
        for (number, osd) in self.osds.iter().enumerate() {
            if let Some(status) = osd.as_ref().and_then(|osd| osd.ended().ok().flatten()) {
                return Err(ClusterError::Ended {
                    daemon: format!("osd.{number}"),
                    status,
                    log: last_words(&self.scratch.join(format!("osd.{number}.out"))),
                });
            }
        }
        Ok(())
    }

    /// The running OSD of that number.
    fn osd(&self, number: u32) -> Result<&Process, ClusterError> {
        self.osds.get(number as usize).and_then(Option::as_ref).ok_or(ClusterError::NoOsd(number))
    }

    /// Makes and starts OSD `number`.
    pub(super) fn osd_add(&mut self, number: u32, store: &Store) -> Result<(), ClusterError> {
        let uuid = random_uuid()?;
        let name = number.to_string();
        if !matches!(store, Store::FileStore { .. }) {
            fs::create_dir(self.scratch.join(format!("osd{number}")))
                .map_err(io("cannot make the OSD's directory"))?;
        }
        self.tell(To::Monitor, &json!({ "prefix": "osd new", "uuid": uuid, "id": number }))?;
        // The uuid must be the same in both places: otherwise the OSD starts and is never marked
        // up.
        let arguments = ["-i", &name, "--mkfs", "--osd-uuid", &uuid];
        match self.in_guest(number) {
            None => drop(self.command("ceph-osd", &arguments)?),
            Some(guest) => {
                let there = guest.command("ceph-osd");
                let mut command = Command::new("timeout");
                command
                    .arg(GUEST_COMMAND_TIMEOUT_S.to_string())
                    .arg(there.get_program())
                    .args(there.get_args());
                command.arg("-c").arg(&self.conf).args(arguments);
                if let Some(server) = self.server(number) {
                    server.enter(&mut command);
                }
                run(&mut command)?;
            }
        }
        self.osds.push(Some(self.start_osd(number)?));
        Ok(())
    }

    /// Starts the daemon of OSD `number`, on its server if it has one.
    fn start_osd(&self, number: u32) -> Result<Process, ClusterError> {
        let (name, server) = (number.to_string(), self.server(number));
        let daemon = Daemon::new("ceph-osd", &name).on(server).within(self.in_guest(number));
        daemon.start(&self.conf, self.scratch.path())
    }

    /// The server of an OSD, if the cluster has a network.
    fn server(&self, number: u32) -> Option<&Namespace> {
        let (network, servers) = self.network.as_ref()?;
        Some(network.servers()[servers.of(number) as usize].namespace())
    }

    /// How commands get into the guest of an OSD; `None` if the OSD is in no guest. The OSD's admin
    /// socket in the guest then also exists here, under the name that it would have for an OSD on
    /// this machine.
    fn in_guest(&self, number: u32) -> Option<Prefix> {
        let guest = self.guests.get(&number)?;
        let here = self.scratch.join(format!("osd.{number}.{PID}.asok"));
        Some(Prefix {
            program: guest.program.clone(),
            address: guest.address,
            share: self.scratch.path().into(),
            socket: (here, config::guest_socket(number)),
        })
    }
}

/// Why a daemon of Ceph ended: the reason in its output, or else the output's last lines.
fn last_words(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let why = text
        .lines()
        .find(|line| line.contains("ceph_abort_msg(") || line.contains("FAILED ceph_assert("));
    why.map_or_else(|| last_lines(&text), |why| why.trim().to_string())
}

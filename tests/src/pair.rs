//! Two daemons that keep second copies for each other, and one volume.

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use tidepool_cluster::device::Emulated;
use tidepool_testkit::admin::in_sync;
use tidepool_testkit::stamps::{Lost, Progress, Workload};
use tidepool_testkit::{Admin, Daemon, Error, Scratch};

use crate::faulty::{DEVICE_SPARE_BYTES, compare, kill_on, volatile_device};
use crate::rig::{VOLUME, verify_plain};
use crate::wire::{Wire, WireMode};

/// Longest wait for a state of the two.
const STATE_TIMEOUT: Duration = Duration::from_secs(60);

/// One of the two.
#[derive(Debug)]
pub struct Host {
    /// The cache's device, where it can lose its power. It goes before the daemon: the kernel keeps
    /// a killed daemon until its device has answered.
    pub device: Option<Emulated>,
    /// The daemon.
    pub daemon: Daemon,
    /// Its admin API.
    pub admin: Admin,
    /// Its NBD socket.
    pub socket: PathBuf,
    /// Its cache file.
    pub cache: PathBuf,
    /// What stands for its boot, where it can lose its power.
    boot: PathBuf,
}

impl Host {
    /// A host with a daemon that does not run yet.
    pub(crate) fn new(
        daemon: Daemon,
        admin: Admin,
        socket: PathBuf,
        cache: PathBuf,
        boot: PathBuf,
    ) -> Host {
        Host { device: None, daemon, admin, socket, cache, boot }
    }

    /// The host whose copy of this one's volume counts, where hosts are called `h0`, `h1` and so
    /// on; waits until there is one.
    pub fn holder(&self) -> Result<usize, Error> {
        let volume = self.wait_sync()?;
        let named = volume["peer"].as_str().and_then(|host| host.strip_prefix('h')?.parse().ok());
        named.ok_or_else(|| Error::Protocol(format!("no host holds the copy: {volume}")))
    }

    /// Connects a workload and checks every sector.
    pub fn verify(&self, workload: &mut Workload) -> Result<(), Error> {
        workload.connect(&self.socket, VOLUME)?;
        match workload.verify()? {
            Progress::Done => Ok(()),
            _ => Err(Error::Disconnected),
        }
    }

    /// The volume's report; `None` where the daemon knows nothing of it.
    pub fn volume(&self) -> Result<Option<Value>, Error> {
        let status = self.admin.status()?;
        let volumes = status["volumes"].as_array();
        Ok(volumes.and_then(|all| all.iter().find(|volume| volume["name"] == VOLUME)).cloned())
    }

    /// Waits until the volume's report is as wanted.
    pub fn wait(&self, what: &str, is: impl FnMut(&Value) -> bool) -> Result<Value, Error> {
        self.admin.wait_volume(VOLUME, STATE_TIMEOUT, is).map_err(|error| match error {
            Error::Timeout { limit, hint, .. } => {
                let hint = format!("{hint}; log: {}", self.daemon.log_tail());
                Error::Timeout { what: what.into(), limit, hint }
            }
            Error::Io { what, source } => {
                Error::Io { what: format!("{what}; log: {}", self.daemon.log_tail()), source }
            }
            error => error,
        })
    }

    /// Waits until whatever is acknowledged is in both logs.
    pub fn wait_sync(&self) -> Result<Value, Error> {
        self.wait("a second copy in sync", in_sync)
    }

    /// Waits until there is no second copy, and write-back works as write-through.
    pub fn wait_degraded(&self) -> Result<Value, Error> {
        self.wait("write-through without a second copy", |volume| {
            volume["replication"]["phase"] == "solo" && volume["mode"] == "write-through"
        })
    }

    /// From its next start on it is on another boot.
    fn boot_again(&mut self, boot: u64) -> std::io::Result<()> {
        std::fs::write(&self.boot, format!("00000000-0000-4000-8000-{boot:012x}\n"))?;
        self.daemon.set_boot(self.boot.clone());
        Ok(())
    }

    /// Is killed, and comes back on another boot; what was not flushed is lost only where it can
    /// lose its power.
    pub fn reboot(&mut self, boot: u64) -> Result<(), Error> {
        self.daemon.kill()?;
        self.boot_again(boot)
            .map_err(|source| Error::Io { what: "cannot write a boot down".into(), source })?;
        self.daemon.start().map(drop)
    }

    /// What was not flushed is lost, as `seed` decides, and the next boot is another one.
    fn lose_power(&mut self, seed: u64) -> Result<(), Error> {
        let io = |source| Error::Io { what: "cannot lose power".into(), source };
        let device = self.device.as_ref().expect("a host that can lose its power");
        device.lose_power(seed).map_err(io)?;
        self.boot_again(seed >> 16).map_err(io)
    }

    /// Has it serve the volume from its copy; returns how long that took.
    pub fn take_over(&self, accept_loss: bool) -> Result<Duration, Error> {
        let start = Instant::now();
        let body = json!({ "accept_loss": accept_loss });
        self.admin.call("POST", &format!("/v1/volumes/{VOLUME}/takeover"), Some(&body))?;
        Ok(start.elapsed())
    }
}

/// What the two are started with.
#[derive(Debug, Clone)]
pub struct PairOptions {
    /// Size of each cache file.
    pub cache_bytes: u64,
    /// URI of the volume's image; a new file of this size if there is none.
    pub image: Result<String, u64>,
    /// Further arguments of both.
    pub extra: Vec<String>,
    /// There is a third host, and all of them have names: h0, h1, h2.
    pub third: bool,
    /// The hosts can lose their power: their caches are on emulated devices of this class, as the
    /// lab names it.
    pub class: Option<&'static str>,
    /// The hosts wait for each other as long as a release does; else ten times as long, so that a
    /// busy machine does not matter.
    pub shipped_limits: bool,
}

impl Default for PairOptions {
    /// Two hosts with caches of 192 MiB and a new image of 32 MiB.
    fn default() -> PairOptions {
        PairOptions {
            cache_bytes: 192 << 20,
            image: Err(32 << 20),
            extra: Vec::new(),
            third: false,
            class: None,
            shipped_limits: false,
        }
    }
}

/// Two hosts under test. Everything goes when it is dropped.
#[derive(Debug)]
pub struct Pair {
    /// The two, and the third.
    pub hosts: Vec<Host>,
    /// Which of them owns the volume.
    pub owner: usize,
    /// What the two are connected by: the one's way to the other, and back.
    wires: [Wire; 2],
    /// The directory with all of that.
    pub scratch: Scratch,
}

impl Pair {
    /// Two running daemons; the first serves the volume, and the other has a copy in sync.
    pub fn new(options: &PairOptions) -> Result<Pair, Error> {
        let io = |source| Error::Io { what: "cannot make a pair's directory".into(), source };
        let scratch = Scratch::new("pair").map_err(io)?;
        let uri = match &options.image {
            Ok(uri) => uri.clone(),
            Err(bytes) => {
                let image = scratch.join("image");
                File::create(&image).and_then(|file| file.set_len(*bytes)).map_err(io)?;
                format!("file:{}?gate={}", image.display(), scratch.join("gate").display())
            }
        };
        let host = |at: usize| {
            let place = |what: &str| scratch.join(format!("{what}{at}"));
            let wire = scratch.join(format!("wire{at}"));
            let start = |class| {
                let bytes = options.cache_bytes + DEVICE_SPARE_BYTES;
                volatile_device(class, bytes, &scratch, &format!("device{at}"))
            };
            let device = options.class.map(start).transpose()?;
            let cache =
                device.as_ref().map_or(place("cache"), |device| device.directory().join("cache"));
            let mut arguments = vec![
                "serve".to_string(),
                format!("--cache={}", cache.display()),
                format!("--cache-size={}", options.cache_bytes),
                format!("--nbd=nbd+unix:///?socket={}", place("nbd").display()),
                format!("--admin={}", place("admin").display()),
                format!("--peer-listen=unix:{}", place("peer").display()),
            ];
            let others = (0..if options.third { 3 } else { 2 }).filter(|other| *other != at);
            // What lies between the first two can be cut.
            let way = |other| {
                if at < 2 && other < 2 {
                    wire.clone()
                } else {
                    scratch.join(format!("peer{other}"))
                }
            };
            arguments.extend(others.map(|other| format!("--peer=unix:{}", way(other).display())));
            arguments.extend(options.extra.iter().cloned());
            let mut host = Host {
                device,
                daemon: Daemon::new(arguments, place("log"))?,
                admin: Admin::new(place("admin")),
                socket: place("nbd"),
                cache,
                boot: place("boot"),
            };
            if !options.shipped_limits {
                host.daemon.use_long_limits()?;
            }
            if options.third {
                host.daemon.set_host(&format!("h{at}"));
            }
            if host.device.is_some() {
                host.boot_again(at as u64).map_err(io)?;
            }
            Ok::<Host, Error>(host)
        };
        let wire = |at: usize| {
            let place = |what: &str, at: usize| scratch.join(format!("{what}{at}"));
            Wire::new(place("wire", at), place("peer", 1 - at)).map_err(io)
        };
        let (wires, mut hosts) = ([wire(0)?, wire(1)?], vec![host(0)?, host(1)?]);
        if options.third {
            hosts.push(host(2)?);
        }
        let mut pair = Pair { hosts, owner: 0, wires, scratch };
        for host in pair.hosts.iter_mut().rev() {
            host.daemon.start()?;
        }
        let volume = json!({ "name": VOLUME, "backend": uri });
        pair.owner().admin.call("POST", "/v1/volumes", Some(&volume))?;
        pair.owner().wait_sync()?;
        Ok(pair)
    }

    /// Changes what lies between the two.
    pub fn set_link(&self, mode: WireMode) {
        self.wires.iter().for_each(|wire| wire.set(mode));
    }

    /// The one that serves the volume.
    pub fn owner(&self) -> &Host {
        &self.hosts[self.owner]
    }

    /// The other one.
    pub fn peer(&self) -> &Host {
        &self.hosts[1 - self.owner]
    }

    /// The image of a pair that was made without one.
    pub fn image(&self) -> PathBuf {
        self.scratch.join("image")
    }

    /// A workload's daemon is gone: the peer takes the volume over, the workload connects there,
    /// and every sector is checked. Returns how long the takeover took.
    pub fn fail_over(&mut self, workload: &mut Workload) -> Result<Duration, Error> {
        workload.server_died();
        let took = self.peer().take_over(false)?;
        self.owner = 1 - self.owner;
        self.verify(workload)?;
        Ok(took)
    }

    /// The owner has its peer, or the third host if that is said, let clients in; it gets the
    /// volume as soon as one of them writes.
    pub fn offer(&self, to: Option<usize>) -> Result<Value, Error> {
        if to.is_none() {
            self.owner().wait_sync()?;
        }
        let body = json!({ "live": true, "to": to.map(|to| format!("h{to}")) });
        self.owner().admin.call("POST", &format!("/v1/volumes/{VOLUME}/handoff"), Some(&body))
    }

    /// The owner hands the volume over to its peer, and the workload, which is not connected, goes
    /// on there. Returns how long that took.
    pub fn hand_over(&mut self, workload: &mut Workload) -> Result<Duration, Error> {
        self.owner().wait_sync()?;
        let start = Instant::now();
        self.owner().admin.call(
            "POST",
            &format!("/v1/volumes/{VOLUME}/handoff"),
            Some(&json!({})),
        )?;
        let took = start.elapsed();
        self.owner = 1 - self.owner;
        self.verify(workload)?;
        Ok(took)
    }

    /// Checks that a file holds exactly what the workload has written, as a plain image without any
    /// cache.
    pub fn verify_plain(
        &self,
        workload: &mut Workload,
        image: &std::path::Path,
    ) -> Result<(), Error> {
        verify_plain(&self.scratch, workload, image)
    }

    /// Both hosts lose their power at once.
    pub fn fail_power(&mut self, seed: u64) -> Result<(), Error> {
        // Neither may see that the other one is gone.
        self.hosts.iter().flat_map(|host| &host.device).for_each(|device| device.faults().cut());
        for at in [self.owner, 1 - self.owner] {
            self.hosts[at].daemon.signal(Signal::KILL)?;
        }
        for Host { daemon, device, .. } in &mut self.hosts {
            kill_on(daemon, device.iter())?;
        }
        for (at, host) in self.hosts.iter_mut().enumerate() {
            host.lose_power(seed ^ (0x5eed << at))?;
        }
        Ok(())
    }

    /// The owner loses its power; the peer sees that it is gone.
    pub fn fail_power_of_owner(&mut self, seed: u64) -> Result<(), Error> {
        let host = &mut self.hosts[self.owner];
        host.device.iter().for_each(|device| device.faults().cut());
        kill_on(&mut host.daemon, host.device.iter())?;
        host.lose_power(seed)
    }

    /// After a power failure, when the volume is served again: looks for what is missing, and
    /// connects the workload.
    ///
    /// # Panics
    /// When something is missing that must not be.
    pub fn compare(&self, workload: &mut Workload, bytes: u64) -> Result<Lost, Error> {
        compare(workload, &self.owner().socket, bytes)
    }

    /// Connects a workload to the owner and checks every sector.
    pub fn verify(&self, workload: &mut Workload) -> Result<(), Error> {
        self.owner().verify(workload)
    }
}

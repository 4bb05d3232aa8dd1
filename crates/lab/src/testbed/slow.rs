//! How devices and network are slowed: by the factor of the ground, and in one hop by a time that
//! the measurement has to find there.

use std::io;
use std::time::Duration;

use super::devices::Device;
use super::{HOST_SSDS, Testbed, failed};
use crate::placement::PlacementError;

/// Number of times a request waits if Ceph is told to delay its dispatches, as clients of release
/// 16 see it.
const OSD_WAITS: f64 = 3.0;
/// Extra seconds of each of these waits, beyond what was asked for.
const OSD_WAIT_EXTRA_S: f64 = 80e-6;

/// A hop that can be slowed, to show that the measurement finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slow {
    /// The network between nodes; the time is that of the round trip.
    Network,
    /// Each command of a disk.
    Disk,
    /// Each command of the first hypervisor's SSD and of the servers' SSDs.
    Ssd,
    /// Each request, before it enters an OSD's queue.
    OsdQueue,
    /// Each command of the second hypervisor's SSD.
    SecondCopy,
}

impl Slow {
    /// The hop that a device belongs to, by the device's name.
    fn of_device(name: &str) -> Slow {
        match name {
            name if name == HOST_SSDS[1] => Slow::SecondCopy,
            name if name.ends_with("-ssd") => Slow::Ssd,
            _ => Slow::Disk,
        }
    }

    /// Checks that a testbed with these devices has the hop. `delays` is whether its network delays
    /// packets. Time that was added to nothing would look like time that nobody measures.
    fn check<'a>(
        self,
        delays: bool,
        mut devices: impl Iterator<Item = &'a str>,
    ) -> Result<(), PlacementError> {
        let has_device = devices.any(|name| Slow::of_device(name) == self);
        let (there, missing) = match self {
            Slow::Network => (delays, "a network with a delay: it takes servers and delay_us"),
            Slow::Disk => (has_device, "a disk"),
            Slow::Ssd => (has_device, "an SSD in a server or the first hypervisor"),
            Slow::SecondCopy => (has_device, "an SSD in a second hypervisor"),
            // A cluster always has OSDs.
            Slow::OsdQueue => (true, ""),
        };
        if there {
            return Ok(());
        }
        let source = io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("the testbed does not have {missing}"),
        );
        Err(failed("cannot add time to a hop")(source))
    }
}

/// Time that is added to a hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Added {
    /// The hop.
    pub hop: Slow,
    /// The added time.
    pub time: Duration,
}

impl Testbed {
    /// Slows devices and network by this factor relative to their class and delay, from now on.
    ///
    /// # Errors
    /// If the network cannot be slowed.
    pub fn slow(&mut self, by: u32) -> Result<(), PlacementError> {
        if std::mem::replace(&mut self.slowed_by, by) == by {
            return Ok(());
        }
        for Device { emulated, spec, .. } in &self.devices {
            emulated.become_like(spec.slowed(by));
        }
        self.delay_packets()
    }

    /// Sets the delay of packets from the network's delay, the slowing factor and the added time.
    fn delay_packets(&self) -> Result<(), PlacementError> {
        let Some((network, delay)) = self.cluster.network().zip(self.delay) else { return Ok(()) };
        let added = self.added.filter(|added| added.hop == Slow::Network).map(|added| added.time);
        // Half of the added time in each direction.
        let delay = delay * self.slowed_by + added.unwrap_or_default() / 2;
        network.set_delay(delay).map_err(|e| failed("cannot slow the network")(io::Error::other(e)))
    }

    /// Adds a time to one hop, in place of the time that was added before; see [`Added`].
    ///
    /// # Errors
    /// If the testbed does not have the hop, or the network or an OSD cannot be slowed.
    pub fn add(&mut self, added: Option<Added>) -> Result<(), PlacementError> {
        if let Some(Added { hop, .. }) = added {
            let delays = self.cluster.network().is_some() && self.delay.is_some();
            let devices = self.devices.iter().map(|device| device.name.as_str());
            hop.check(delays, devices)?;
        }
        self.added = added;
        let of = |hop: Slow| {
            added.filter(|added| added.hop == hop).map_or(Duration::ZERO, |added| added.time)
        };
        for (name, device) in self.devices() {
            device.lengthen(of(Slow::of_device(name)));
        }
        self.delay_packets()?;
        let seconds = (of(Slow::OsdQueue).as_secs_f64() / OSD_WAITS - OSD_WAIT_EXTRA_S).max(0.0);
        for (option, value) in [
            ("osd_debug_inject_dispatch_delay_duration", seconds),
            ("osd_debug_inject_dispatch_delay_probability", f64::from(u8::from(seconds > 0.0))),
        ] {
            for osd in 0..self.ground.slots.len() {
                self.cluster.ceph(&[
                    "tell",
                    &format!("osd.{osd}"),
                    "config",
                    "set",
                    option,
                    &value.to_string(),
                ])?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testbed::devices::{disk, server_ssd};

    #[test]
    fn time_is_added_only_to_a_hop_that_the_testbed_has() {
        let (host, server) = (HOST_SSDS.map(String::from), server_ssd(0));
        let check = |hop: Slow, delays, devices: &[&String]| {
            hop.check(delays, devices.iter().map(|name| name.as_str()))
                .map_err(|error| error.to_string())
        };
        let disk = disk(0);
        for (hop, without, with) in [
            (Slow::Disk, vec![&host[0]], &disk),
            (Slow::Ssd, vec![&disk, &host[1]], &host[0]),
            (Slow::Ssd, vec![&disk], &server),
            (Slow::SecondCopy, vec![&disk, &host[0], &server], &host[1]),
        ] {
            let told = check(hop, true, &without).expect_err("the hop is missing");
            assert!(told.contains("does not have a"), "{told}");
            assert_eq!(check(hop, false, &[without[0], with]), Ok(()), "{hop:?}");
        }
        let told = check(Slow::Network, false, &[&disk]).expect_err("nothing delays packets");
        assert!(told.contains("does not have a network with a delay"), "{told}");
        assert_eq!(check(Slow::Network, true, &[]), Ok(()));
        assert_eq!(check(Slow::OsdQueue, false, &[]), Ok(()));
    }
}

//! Guests whose kernel maps an image. The guest's network is QEMU's user network: QEMU opens the
//! connections from the hypervisor's place in the network.

use std::fs;
use std::path::Path;

use super::{Access, AccessError, failed};
use tidepool_cluster::vm::{self, Kernel, Vm, VmError};

/// Kernel modules of a guest that maps an image. One of them requests CRC-32C by name when it is
/// loaded, so `crc32c_generic` is among them.
pub(super) const MODULES: [&str; 3] = ["virtio_net", "crc32c_generic", "rbd"];
/// The image's device in the guest.
pub(super) const DISK: &str = "/dev/rbd0";

/// A script that brings the guest's network up. QEMU connects to any address that the guest names.
/// A cluster on the loopback interface has an address that is also the guest's own: the guest's
/// kernel sends packets to such an address only with `route_localnet`.
const NETWORK: &str = "ip link set lo up && ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0 && \
    for name in all eth0; do echo 1 >/proc/sys/net/ipv4/conf/$name/route_localnet; echo 0 >/proc/sys/net/ipv4/conf/$name/rp_filter; done; \
    ip route add default via 10.0.2.2 dev eth0";

/// Checks whether a guest can map images on this machine. The error is the reason why not, in one
/// line.
pub(super) fn probe() -> Result<(), String> {
    vm::probe()?;
    let kernel = Kernel::installed().map_err(|why| why.to_string())?;
    kernel.modules(&MODULES).map(drop).map_err(|why| why.to_string())
}

/// QEMU's options for the devices of a guest that maps an image.
pub(super) fn devices() -> Vec<String> {
    ["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="]
        .map(String::from)
        .to_vec()
}

/// The addresses of a cluster's monitors, as the kernel's client expects them.
#[derive(Debug, PartialEq)]
pub(super) struct Monitors(String);

impl Monitors {
    /// Reads the addresses from ceph.conf.
    pub(super) fn of(conf: &Path) -> Result<Monitors, AccessError> {
        let text =
            fs::read_to_string(conf).map_err(failed(format!("cannot read {}", conf.display())))?;
        Monitors::read(&text).ok_or_else(|| AccessError::NotInPlace {
            access: Access::Krbd,
            what: format!(
                "{} names no monitor with an address of the first messenger",
                conf.display()
            ),
        })
    }

    fn read(conf: &str) -> Option<Monitors> {
        let (_, hosts) = conf.lines().find_map(|line| {
            let (key, value) = line.split_once('=')?;
            Some((key.trim().replace('_', " "), value)).filter(|(key, _)| key == "mon host")
        })?;
        let addresses =
            hosts.split(|c: char| "[], ".contains(c)).filter_map(|word| word.strip_prefix("v1:"));
        let addresses: Vec<&str> = addresses.collect();
        (!addresses.is_empty()).then(|| Monitors(addresses.join(",")))
    }

    /// The line that makes the kernel map an image.
    fn line(&self, image: &str) -> String {
        format!("{} name=admin rbd {image}", self.0)
    }

    /// Makes a guest map an image.
    pub(super) fn map(&self, vm: &Vm, image: &str) -> Result<(), AccessError> {
        run(vm, NETWORK)?;
        let local = self.0.starts_with("127.");
        if local {
            run(
                vm,
                "ip addr del 127.0.0.1/8 dev lo; ip route add 127.0.0.1/32 via 10.0.2.2 dev eth0",
            )?;
        }
        run(
            vm,
            &format!("echo '{}' >/sys/bus/rbd/add_single_major && [ -b {DISK} ]", self.line(image)),
        )
    }
}

/// Makes a guest unmap its image.
pub(super) fn unmap(vm: &Vm) -> Result<(), AccessError> {
    run(vm, "echo 0 >/sys/bus/rbd/remove_single_major")
}

/// Runs a script in a guest. The script must print nothing unless it fails.
fn run(vm: &Vm, script: &str) -> Result<(), AccessError> {
    let said = vm.tell(&[
        "sh",
        "-c",
        &format!("{{ {script}; }} || echo \"it failed; $(dmesg | tail -n 1)\""),
    ])?;
    let said = said.trim().replace('\n', "; ");
    if said.is_empty() {
        return Ok(());
    }
    Err(VmError::Failed(format!("the guest {}: `{script}`: {said}", vm.name())).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_told_the_addresses_of_the_first_messenger() {
        let conf = "[global]\nmon host = [v2:10.213.0.1:3301,v1:10.213.0.1:3300]\nfsid = x\n";
        let monitors = Monitors::read(conf).expect("a monitor");
        assert_eq!(monitors.line("img0"), "10.213.0.1:3300 name=admin rbd img0");
        let two = "mon_host = [v2:10.0.0.1:1,v1:10.0.0.1:2],[v2:10.0.0.2:1,v1:10.0.0.2:2]";
        assert_eq!(Monitors::read(two), Some(Monitors("10.0.0.1:2,10.0.0.2:2".into())));
        for none in ["", "mon host = v2:10.0.0.1:1", "fsid = v1:1"] {
            assert_eq!(Monitors::read(none), None, "{none}");
        }
    }
}

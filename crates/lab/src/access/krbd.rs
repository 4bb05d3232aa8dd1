//! A guest's kernel that maps an image. Its network is QEMU's user network, which opens connections in the hypervisor's place in the network.

use std::fs;
use std::path::Path;

use super::{Access, AccessError, failed};
use crate::vm::{self, Kernel, Vm, VmError};

/// Modules of a guest that maps an image. One of them asks for checksums (CRC-32C) by name when it is loaded.
pub(super) const MODULES: [&str; 3] = ["virtio_net", "crc32c_generic", "rbd"];
/// The image in the guest.
pub(super) const DISK: &str = "/dev/rbd0";

/// Brings the network up. QEMU connects to whatever address the guest names; that of a cluster on the loopback interface is one of the
/// guest's own, and is sent out only when its kernel is told to.
const NETWORK: &str = "ip link set lo up && ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0 && \
    for name in all eth0; do echo 1 >/proc/sys/net/ipv4/conf/$name/route_localnet; echo 0 >/proc/sys/net/ipv4/conf/$name/rp_filter; done; \
    ip route add default via 10.0.2.2 dev eth0";

/// Says in one line why a guest cannot map images on this machine.
pub(super) fn probe() -> Result<(), String> {
    vm::probe()?;
    let kernel = Kernel::installed().map_err(|why| why.to_string())?;
    kernel.modules(&MODULES).map(drop).map_err(|why| why.to_string())
}

/// Devices of a guest that maps an image, in QEMU's words.
pub(super) fn devices() -> Vec<String> {
    ["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="].map(String::from).to_vec()
}

/// The monitors of a cluster, as a kernel's client reaches them.
#[derive(Debug, PartialEq)]
pub(super) struct Monitors(String);

impl Monitors {
    /// Reads them from ceph.conf.
    pub(super) fn of(conf: &Path) -> Result<Monitors, AccessError> {
        let text = fs::read_to_string(conf).map_err(failed(format!("cannot read {}", conf.display())))?;
        Monitors::read(&text).ok_or_else(|| AccessError::NotInPlace {
            access: Access::Krbd,
            what: format!("{} names no monitor with an address of the first messenger", conf.display()),
        })
    }

    fn read(conf: &str) -> Option<Monitors> {
        let (_, hosts) = conf.lines().find_map(|line| {
            let (key, value) = line.split_once('=')?;
            Some((key.trim().replace('_', " "), value)).filter(|(key, _)| key == "mon host")
        })?;
        let addresses = hosts.split(|c: char| "[], ".contains(c)).filter_map(|word| word.strip_prefix("v1:"));
        let addresses: Vec<&str> = addresses.collect();
        (!addresses.is_empty()).then(|| Monitors(addresses.join(",")))
    }

    /// The line with which the kernel maps an image.
    fn line(&self, image: &str) -> String {
        format!("{} name=admin rbd {image}", self.0)
    }

    /// Has a guest map an image.
    pub(super) fn map(&self, vm: &Vm, image: &str) -> Result<(), AccessError> {
        run(vm, NETWORK)?;
        let local = self.0.starts_with("127.");
        if local {
            run(vm, "ip addr del 127.0.0.1/8 dev lo; ip route add 127.0.0.1/32 via 10.0.2.2 dev eth0")?;
        }
        run(vm, &format!("echo '{}' >/sys/bus/rbd/add_single_major && [ -b {DISK} ]", self.line(image)))
    }
}

/// Has a guest let go of its image.
pub(super) fn unmap(vm: &Vm) -> Result<(), AccessError> {
    run(vm, "echo 0 >/sys/bus/rbd/remove_single_major")
}

/// Runs a script in a guest that prints nothing unless it fails.
fn run(vm: &Vm, script: &str) -> Result<(), AccessError> {
    let said =
        vm.tell(&["sh", "-c", &format!("{{ {script}; }} || echo \"it failed; $(dmesg | tail -n 1)\"")])?;
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

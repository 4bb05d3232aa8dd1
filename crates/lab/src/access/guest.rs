//! Clients in guests. Each image has a guest of QEMU on the hypervisor of the image's clients, and
//! fio runs in the guest. The guest's disk is what is in front of the cluster, through virtio-blk,
//! or the guest's own kernel maps the image (krbd).
//!
//! Guests stand in front of the placement between clients and cluster. Other access paths stand
//! between that placement and the cluster.

use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::krbd::{self, Monitors};
use super::librbd::{self, Counted};
use super::{Access, AccessError, Image, InPlace, Site, exporter, failed};
use crate::collect::machine;
use tidepool_cluster::fio::{Endpoint, PageCache};
use tidepool_cluster::qemu::quoted;
use tidepool_cluster::vm::{self, Vm};

/// Prefix of the names of files of librbd in the guests' QEMU.
const NAME: &str = "guest";
/// Kernel modules for a virtio-blk disk and for the guest's ports.
const MODULES: [&str; 3] = ["virtio_pci", "virtio_console", "virtio_blk"];
/// The virtio-blk disk in the guest.
const DISK: &str = "/dev/vda";
/// Size of a disk that keeps nothing, in bytes: larger than the data set of any workload.
const NOTHING_BYTES: u64 = 1 << 40;
/// The line of a ceph.conf with which librbd caches.
const CACHE: &str = "rbd cache = true\n";
/// The number of flushes among the fields of a disk's `stat`, counted from 0 (Linux,
/// Documentation/block/stat.rst).
const FLUSHES_FIELD: usize = 15;
/// Microseconds of a tick, the unit in which the kernel reports processor times.
const TICK_US: u64 = 10_000;

/// Checks whether clients can be in guests on this machine. The error is the reason why not, in one
/// line.
pub(super) fn probe() -> Result<(), String> {
    vm::probe()?;
    exporter::probe("block-rbd.so")
}

/// What is behind the guests' disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Behind {
    /// The placement in front of the cluster, or the cluster.
    Images,
    /// Nothing: QEMU answers at once and keeps nothing.
    Nothing,
}

/// Guests with clients, and the root and kernel that they boot.
#[derive(Debug)]
pub(crate) struct Guests {
    access: Access,
    behind: Behind,
    boot: vm::Image,
    site: Site,
    /// The images with their guests, in the order of the images; empty until the guests are booted.
    inside: Vec<(Image, Arc<Vm>)>,
    /// Whether librbd in the guests' QEMU caches; `None` where QEMU does not use librbd.
    librbd: Option<Cache>,
}

/// Whether librbd in QEMU caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cache {
    Off,
    On,
}

impl Guests {
    /// Makes the root that the guests boot. No guest is booted yet.
    ///
    /// # Errors
    /// When something that the guests need is missing.
    pub(crate) fn prepare(access: Access, site: Site) -> Result<Guests, AccessError> {
        let mapping: &[&str] = if access.maps() { &krbd::MODULES } else { &[] };
        let modules: Vec<&str> = MODULES.iter().chain(mapping).copied().collect();
        let boot = vm::Image::build(site.directory.join("guest.cpio"), &modules)?;
        Ok(Guests { access, behind: Behind::Images, boot, site, inside: Vec::new(), librbd: None })
    }

    /// Boots guests whose disks answer at once and keep nothing: a bound for all clients in guests.
    pub(super) fn nothing(site: Site) -> Result<Guests, AccessError> {
        let mut guests = Guests::prepare(Access::Guest, site)?;
        guests.behind = Behind::Nothing;
        guests.enter(&|_| None)?;
        Ok(guests)
    }

    /// The access path.
    pub(crate) fn access(&self) -> Access {
        self.access
    }

    /// Boots a guest for each image. `within` returns the endpoint in front of an image, which
    /// becomes the guest's disk. It is not called where the guest's own kernel maps the image.
    ///
    /// # Errors
    /// When a guest does not boot, or does not find its disk. No guest is left then.
    pub(crate) fn enter(
        &mut self,
        within: &dyn Fn(&str) -> Option<Endpoint>,
    ) -> Result<(), AccessError> {
        self.inside.clear();
        self.librbd = None;
        let entered = self.boot_all(within);
        if entered.is_err() {
            self.inside.clear();
        }
        entered
    }

    fn boot_all(&mut self, within: &dyn Fn(&str) -> Option<Endpoint>) -> Result<(), AccessError> {
        for image in self.site.images.clone() {
            let devices = match self.behind {
                _ if self.access.maps() => krbd::devices(),
                Behind::Nothing => virtio(
                    &format!("driver=null-co,size={NOTHING_BYTES},read-zeroes=on"),
                    Cache::Off,
                ),
                Behind::Images => {
                    let blockdev = self.blockdev(&image, within(&image.name))?;
                    virtio(&blockdev, self.librbd.unwrap_or(Cache::Off))
                }
            };
            let namespace = image.node.as_ref().map(|node| &node.namespace);
            let vm = Vm::start(&self.boot, &self.site.directory, &image.name, namespace, &devices)?;
            self.inside.push((image, Arc::new(vm)));
        }
        self.inside.iter().try_for_each(|(_, vm)| vm.wait())?;
        if self.access.maps() {
            let monitors = Monitors::of(&self.site.conf)?;
            self.inside.iter().try_for_each(|(image, vm)| monitors.map(vm, &image.name))?;
        }
        Ok(())
    }

    /// QEMU's option for the block device of a guest: the endpoint in front of an image.
    fn blockdev(&mut self, image: &Image, within: Option<Endpoint>) -> Result<String, AccessError> {
        let text = |path: &std::path::Path| quoted(&path.display().to_string());
        match within {
            Some(Endpoint::Nbd { socket, export }) => Ok(format!(
                "driver=nbd,server.type=unix,server.path={},export={}",
                text(&socket),
                quoted(&export)
            )),
            Some(Endpoint::Rbd { conf, .. }) => {
                let told = fs::read_to_string(&conf)
                    .map_err(failed(format!("cannot read {}", conf.display())))?;
                self.librbd = Some(if told.contains(CACHE) { Cache::On } else { Cache::Off });
                let conf = librbd::conf(&conf, &self.site.directory, NAME)?;
                Ok(format!(
                    "driver=rbd,pool=rbd,image={},conf={}",
                    quoted(&image.name),
                    text(&conf)
                ))
            }
            other => Err(self.not(format!(
                "a guest has no disk on {other:?}, which is in front of {}",
                image.name
            ))),
        }
    }

    /// Ends all guests, which closes their disks.
    ///
    /// # Errors
    /// When a guest does not end.
    pub(crate) fn leave(&mut self) -> Result<(), AccessError> {
        let inside = std::mem::take(&mut self.inside);
        if self.access.maps() {
            inside.iter().try_for_each(|(_, vm)| krbd::unmap(vm))?;
        }
        Ok(inside.iter().try_for_each(|(_, vm)| vm.stop())?)
    }

    fn processes(&self) -> Vec<u32> {
        self.inside.iter().map(|(_, vm)| vm.id()).collect()
    }

    /// The counters of librbd in the guests' QEMU.
    fn counted(&self) -> Result<Counted, AccessError> {
        Counted::now(&self.site.directory, NAME, &self.processes())
    }

    /// Proves that librbd in the guests' QEMU caches or does not cache, as `cache` says.
    fn caches_as_meant(&self, cache: Cache) -> Result<Value, AccessError> {
        let wanted = if cache == Cache::On { "true" } else { "false" };
        let told = librbd::ask_all(&self.site.directory, NAME, &self.processes(), "config show")?;
        let other = told.iter().map(|config| &config["rbd_cache"]).find(|found| *found != wanted);
        match other {
            None => Ok(json!(wanted)),
            Some(found) => Err(self.not(format!("rbd_cache in QEMU is {found}, not {wanted}"))),
        }
    }

    /// Images to whose disks the kernel of a guest has sent a flush.
    ///
    /// # Errors
    /// When a guest does not answer.
    pub(crate) fn flushed(&self) -> Result<Vec<String>, AccessError> {
        let mut flushed = Vec::new();
        for (image, vm) in &self.inside {
            let said = vm.tell(&["cat", &self.in_sysfs("stat")])?;
            let flushes =
                said.split_whitespace().nth(FLUSHES_FIELD).and_then(|count| count.parse().ok());
            let flushes: u64 = flushes.ok_or_else(|| {
                self.not(format!("the guest {} counts no flushes: {said}", vm.name()))
            })?;
            flushed.extend((flushes > 0).then(|| image.name.clone()));
        }
        Ok(flushed)
    }

    fn disk(&self) -> &'static str {
        if self.access.maps() { krbd::DISK } else { DISK }
    }

    /// The path of a file of the disk in the guest's sysfs.
    fn in_sysfs(&self, file: &str) -> String {
        format!("/sys/block/{}/{file}", self.disk().trim_start_matches("/dev/"))
    }

    /// What a guest's kernel reports about its disk.
    fn disk_of(&self, vm: &Vm) -> Result<Value, AccessError> {
        let said = |file: &str| -> Result<String, AccessError> {
            Ok(vm.tell(&["cat", &self.in_sysfs(file)])?.trim().to_string())
        };
        let (sectors, cache) = (said("size")?, said("queue/write_cache")?);
        let bytes =
            sectors.parse::<u64>().ok().filter(|sectors| *sectors > 0).map(|sectors| sectors * 512);
        let Some(bytes) = bytes else {
            return Err(self.not(format!(
                "the guest {} has no disk {}: {sectors}",
                vm.name(),
                self.disk()
            )));
        };
        // A kernel sends no flush to a virtio-blk disk that reports write-through.
        if !self.access.maps() && cache != "write back" {
            return Err(self.not(format!(
                "the disk of the guest {} is \"{cache}\": no flush would be sent",
                vm.name()
            )));
        }
        Ok(json!({ "guest": vm.name(), "disk": self.disk(), "bytes": bytes, "write_cache": cache }))
    }

    fn not(&self, what: String) -> AccessError {
        AccessError::NotInPlace { access: self.access, what }
    }
}

/// QEMU's options for a virtio-blk disk. With [`Cache::Off`] the disk bypasses the host's caches.
/// With [`Cache::On`] it does not, because QEMU turns librbd's cache on for such a disk.
fn virtio(blockdev: &str, cache: Cache) -> Vec<String> {
    let direct = if cache == Cache::On { "off" } else { "on" };
    [
        "-blockdev",
        &format!("{blockdev},node-name=disk,cache.direct={direct},cache.no-flush=off"),
        "-device",
        "virtio-blk-pci,drive=disk,write-cache=on",
    ]
    .map(String::from)
    .to_vec()
}

impl InPlace for Guests {
    fn verify(&self) -> Result<Value, AccessError> {
        self.holds()?;
        let disks =
            self.inside.iter().map(|(_, vm)| self.disk_of(vm)).collect::<Result<Vec<_>, _>>()?;
        let mut proof = json!({ "kernel": self.boot.kernel(), "guests": disks });
        if let Some(cache) = self.librbd {
            proof["rbd_cache"] = self.caches_as_meant(cache)?;
            let opened = self.counted()?.images;
            let wanted: BTreeSet<String> =
                self.inside.iter().map(|(image, _)| image.name.clone()).collect();
            if opened != wanted {
                return Err(self.not(format!("librbd in QEMU has {opened:?} open, not {wanted:?}")));
            }
            proof["opened_by_librbd_there"] = json!(opened);
        }
        Ok(proof)
    }

    fn holds(&self) -> Result<(), AccessError> {
        Ok(self.inside.iter().try_for_each(|(_, vm)| vm.holds())?)
    }

    fn endpoint(&self, image: &str) -> Option<Endpoint> {
        let (_, vm) = self.inside.iter().find(|(known, _)| known.name == image)?;
        let page_cache = match self.access {
            Access::KrbdWriteback => PageCache::Through,
            Access::KrbdUnsafe => PageCache::Unsafe,
            _ => PageCache::Past,
        };
        Some(Endpoint::Guest { vm: vm.clone(), disk: self.disk().into(), page_cache })
    }

    fn uri(&self, _image: &str) -> Option<String> {
        None
    }

    /// Times of the guests' processors, as the guests' kernels report them, and the counters of
    /// librbd in the guests' QEMU.
    fn counters(&self) -> Result<Map<String, Value>, AccessError> {
        let mut counters =
            if self.librbd.is_some() { self.counted()?.counters } else { Map::new() };
        let mut sums = [0; 3];
        for (_, vm) in &self.inside {
            let text = vm.tell(&["cat", "/proc/stat"])?;
            let time = machine(&text).ok_or_else(|| {
                self.not(format!("the guest {} tells no times of its processor", vm.name()))
            })?;
            for (sum, ticks) in sums.iter_mut().zip([time.busy, time.iowait, time.total]) {
                *sum += ticks * TICK_US;
            }
        }
        for (name, us) in ["cpu_busy_us", "cpu_iowait_us", "cpu_us"].iter().zip(sums) {
            counters.insert((*name).into(), json!(us));
        }
        Ok(counters)
    }

    fn undo(mut self: Box<Self>) -> Result<(), AccessError> {
        self.leave()
    }
}

impl Drop for Guests {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.site.directory.join("guest.cpio"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidepool_cluster::scratch::Scratch;

    fn guests(directory: &Scratch, access: Access) -> Guests {
        let conf = directory.join("client.conf");
        fs::write(&conf, "[global]\n[client]\n").expect("written");
        let site =
            Site { directory: directory.path().into(), conf, gateway: None, images: Vec::new() };
        let boot = vm::Image::unbuilt();
        Guests { access, behind: Behind::Images, boot, site, inside: Vec::new(), librbd: None }
    }

    #[test]
    fn a_guest_has_its_disk_on_what_is_in_front_of_the_image() {
        let scratch = Scratch::new("guests").expect("a directory");
        let mut guests = guests(&scratch, Access::Guest);
        let image = Image { name: "img,0".into(), host: 0, node: None };
        let export = Endpoint::Nbd { socket: "/run/a,b.sock".into(), export: "img,0".into() };
        let found = guests.blockdev(&image, Some(export)).expect("a disk");
        assert_eq!(found, "driver=nbd,server.type=unix,server.path=/run/a,,b.sock,export=img,,0");
        assert_eq!(guests.librbd, None, "the cache has it");
        for (told, cache) in
            [("rbd cache = true\n", Cache::On), ("rbd cache = false\n", Cache::Off)]
        {
            let of = scratch.join("of.conf");
            fs::write(&of, format!("[global]\n[client]\n{told}")).expect("written");
            let found = guests.blockdev(&image, Some(Endpoint::rbd(of, "img,0"))).expect("a disk");
            assert!(found.starts_with("driver=rbd,pool=rbd,image=img,,0,conf="), "{found}");
            assert_eq!(guests.librbd, Some(cache), "{told}");
        }
        let conf = fs::read_to_string(scratch.join("guest.conf")).expect("QEMU's own ceph.conf");
        assert!(conf.contains("admin socket"), "its librbd is asked there: {conf}");
        let told = guests
            .blockdev(&image, Some(Endpoint::File("/f".into())))
            .expect_err("no image")
            .to_string();
        assert!(told.contains("in front of img,0") && !told.contains('\n'), "{told}");
    }

    #[test]
    fn a_disk_of_virtio_passes_the_hosts_caches_and_takes_flushes() {
        let words = |cache| virtio("driver=null-co", cache).join(" ");
        let past = words(Cache::Off);
        assert!(
            past.contains("cache.direct=on,cache.no-flush=off") && past.contains("write-cache=on")
        );
        let cached = words(Cache::On);
        assert!(
            cached.contains("cache.direct=off,cache.no-flush=off")
                && cached.contains("write-cache=on")
        );
    }
}

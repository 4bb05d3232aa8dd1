//! Clients in guests: each image has a guest of QEMU on the hypervisor of its clients, in which fio runs. The guest's disk is what is in front of
//! the cluster, through virtio-blk, or the guest's own kernel maps the image (krbd).
//!
//! Guests stand before whatever is in front of the cluster, other than the paths that are between a cache and the cluster.

use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::krbd::{self, Monitors};
use super::librbd::{self, Counted};
use super::{Access, AccessError, Image, InPlace, Site, exporter, failed};
use crate::collect::machine;
use crate::fio::{Endpoint, PageCache};
use crate::qemu::quoted;
use crate::vm::{self, Vm};

/// What the guests' librbd is called in the names of files.
const NAME: &str = "guest";
/// Modules for a disk of virtio-blk, and for the ports.
const MODULES: [&str; 3] = ["virtio_pci", "virtio_console", "virtio_blk"];
/// That disk in the guest.
const DISK: &str = "/dev/vda";
/// Size of a disk that keeps nothing, in bytes: larger than any set.
const NOTHING_BYTES: u64 = 1 << 40;
/// What ceph.conf says where librbd caches.
const CACHE: &str = "rbd cache = true\n";
/// The number of flushes among the fields of a disk's `stat`, from 0 (Linux, Documentation/block/stat.rst).
const FLUSHES_FIELD: usize = 15;
/// Microseconds of a tick in which the kernel tells times to programs.
const TICK_US: u64 = 10_000;

/// Says in one line why clients cannot be in guests on this machine.
pub(super) fn probe() -> Result<(), String> {
    vm::probe()?;
    exporter::probe("block-rbd.so")
}

/// What guests have their disks on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Behind {
    /// What is in front of the cluster, or the cluster.
    Images,
    /// Nothing: QEMU answers at once and keeps nothing.
    Nothing,
}

/// Guests with clients, and what they boot.
#[derive(Debug)]
pub(crate) struct Guests {
    access: Access,
    behind: Behind,
    boot: vm::Image,
    site: Site,
    /// Of the images, in their order; none before clients have entered.
    inside: Vec<(Image, Arc<Vm>)>,
    /// Their QEMU has librbd itself, with its cache or without.
    librbd: Option<Cache>,
}

/// Whether librbd in QEMU caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cache {
    Off,
    On,
}

impl Guests {
    /// Makes what they boot. There is none yet.
    ///
    /// # Errors
    /// When something that they need is missing.
    pub(crate) fn prepare(access: Access, site: Site) -> Result<Guests, AccessError> {
        let mapping: &[&str] = if access.maps() { &krbd::MODULES } else { &[] };
        let modules: Vec<&str> = MODULES.iter().chain(mapping).copied().collect();
        let boot = vm::Image::build(site.directory.join("guest.cpio"), &modules)?;
        Ok(Guests { access, behind: Behind::Images, boot, site, inside: Vec::new(), librbd: None })
    }

    /// Guests whose disks answer at once and keep nothing: what the path alone can do.
    pub(super) fn nothing(site: Site) -> Result<Guests, AccessError> {
        let mut guests = Guests::prepare(Access::Guest, site)?;
        guests.behind = Behind::Nothing;
        guests.enter(&|_| None)?;
        Ok(guests)
    }

    /// The path.
    pub(crate) fn access(&self) -> Access {
        self.access
    }

    /// Boots a guest for each image, on what `within` says is in front of it.
    ///
    /// # Errors
    /// When one does not boot, or does not find its disk. None is left then.
    pub(crate) fn enter(&mut self, within: &dyn Fn(&str) -> Option<Endpoint>) -> Result<(), AccessError> {
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
                Behind::Nothing => {
                    virtio(&format!("driver=null-co,size={NOTHING_BYTES},read-zeroes=on"), Cache::Off)
                }
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

    /// How QEMU has what is in front of an image, in its words.
    fn blockdev(&mut self, image: &Image, within: Option<Endpoint>) -> Result<String, AccessError> {
        let text = |path: &std::path::Path| quoted(&path.display().to_string());
        match within {
            Some(Endpoint::Nbd { socket, export }) => Ok(format!(
                "driver=nbd,server.type=unix,server.path={},export={}",
                text(&socket),
                quoted(&export)
            )),
            Some(Endpoint::Rbd { conf, .. }) => {
                let told =
                    fs::read_to_string(&conf).map_err(failed(format!("cannot read {}", conf.display())))?;
                self.librbd = Some(if told.contains(CACHE) { Cache::On } else { Cache::Off });
                let conf = librbd::conf(&conf, &self.site.directory, NAME)?;
                Ok(format!("driver=rbd,pool=rbd,image={},conf={}", quoted(&image.name), text(&conf)))
            }
            other => {
                Err(self
                    .not(format!("a guest has no disk on {other:?}, which is in front of {}", image.name)))
            }
        }
    }

    /// Ends all of them, with their disks closed.
    ///
    /// # Errors
    /// When one does not end.
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

    /// What librbd in their QEMU counts.
    fn counted(&self) -> Result<Counted, AccessError> {
        Counted::now(&self.site.directory, NAME, &self.processes())
    }

    /// Shows that librbd in their QEMU caches if it is to, and does not otherwise.
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
    /// When one does not answer.
    pub(crate) fn flushed(&self) -> Result<Vec<String>, AccessError> {
        let mut flushed = Vec::new();
        for (image, vm) in &self.inside {
            let said = vm.tell(&["cat", &self.in_sysfs("stat")])?;
            let flushes = said.split_whitespace().nth(FLUSHES_FIELD).and_then(|count| count.parse().ok());
            let flushes: u64 = flushes
                .ok_or_else(|| self.not(format!("the guest {} counts no flushes: {said}", vm.name())))?;
            flushed.extend((flushes > 0).then(|| image.name.clone()));
        }
        Ok(flushed)
    }

    fn disk(&self) -> &'static str {
        if self.access.maps() { krbd::DISK } else { DISK }
    }

    /// What a guest's kernel says of its disk: where that is in the guest.
    fn in_sysfs(&self, file: &str) -> String {
        format!("/sys/block/{}/{file}", self.disk().trim_start_matches("/dev/"))
    }

    /// What a guest's kernel says of its disk.
    fn disk_of(&self, vm: &Vm) -> Result<Value, AccessError> {
        let said = |file: &str| -> Result<String, AccessError> {
            Ok(vm.tell(&["cat", &self.in_sysfs(file)])?.trim().to_string())
        };
        let (sectors, cache) = (said("size")?, said("queue/write_cache")?);
        let bytes = sectors.parse::<u64>().ok().filter(|sectors| *sectors > 0).map(|sectors| sectors * 512);
        let Some(bytes) = bytes else {
            return Err(self.not(format!("the guest {} has no disk {}: {sectors}", vm.name(), self.disk())));
        };
        // A kernel sends no flush to a disk of virtio-blk that says it writes through.
        if !self.access.maps() && cache != "write back" {
            return Err(self
                .not(format!("the disk of the guest {} is \"{cache}\": no flush would be sent", vm.name())));
        }
        Ok(json!({ "guest": vm.name(), "disk": self.disk(), "bytes": bytes, "write_cache": cache }))
    }

    fn not(&self, what: String) -> AccessError {
        AccessError::NotInPlace { access: self.access, what }
    }
}

/// A disk of virtio-blk, past caches of the host. QEMU turns librbd's cache on where a disk does not go past them.
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
        let disks = self.inside.iter().map(|(_, vm)| self.disk_of(vm)).collect::<Result<Vec<_>, _>>()?;
        let mut proof = json!({ "kernel": self.boot.kernel(), "guests": disks });
        if let Some(cache) = self.librbd {
            proof["rbd_cache"] = self.caches_as_meant(cache)?;
            let opened = self.counted()?.images;
            let wanted: BTreeSet<String> = self.inside.iter().map(|(image, _)| image.name.clone()).collect();
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

    /// Times of the guests' processors as their kernels tell them, beside what librbd in their QEMU counts.
    fn counters(&self) -> Result<Map<String, Value>, AccessError> {
        let mut counters = if self.librbd.is_some() { self.counted()?.counters } else { Map::new() };
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
    use crate::scratch::Scratch;

    fn guests(directory: &Scratch, access: Access) -> Guests {
        let conf = directory.join("client.conf");
        fs::write(&conf, "[global]\n[client]\n").expect("written");
        let site = Site { directory: directory.path().into(), conf, gateway: None, images: Vec::new() };
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
        for (told, cache) in [("rbd cache = true\n", Cache::On), ("rbd cache = false\n", Cache::Off)] {
            let of = scratch.join("of.conf");
            fs::write(&of, format!("[global]\n[client]\n{told}")).expect("written");
            let found = guests.blockdev(&image, Some(Endpoint::rbd(of, "img,0"))).expect("a disk");
            assert!(found.starts_with("driver=rbd,pool=rbd,image=img,,0,conf="), "{found}");
            assert_eq!(guests.librbd, Some(cache), "{told}");
        }
        let conf = fs::read_to_string(scratch.join("guest.conf")).expect("QEMU's own ceph.conf");
        assert!(conf.contains("admin socket"), "its librbd is asked there: {conf}");
        let told =
            guests.blockdev(&image, Some(Endpoint::File("/f".into()))).expect_err("no image").to_string();
        assert!(told.contains("in front of img,0") && !told.contains('\n'), "{told}");
    }

    #[test]
    fn a_disk_of_virtio_passes_the_hosts_caches_and_takes_flushes() {
        let words = |cache| virtio("driver=null-co", cache).join(" ");
        let past = words(Cache::Off);
        assert!(past.contains("cache.direct=on,cache.no-flush=off") && past.contains("write-cache=on"));
        let cached = words(Cache::On);
        assert!(cached.contains("cache.direct=off,cache.no-flush=off") && cached.contains("write-cache=on"));
    }
}

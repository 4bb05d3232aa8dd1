//! Clients that need a kernel of their own: a virtual machine that boots on the image itself, and
//! the kernel's RBD client.

use std::time::Duration;

use tidepool_testkit::guest::{Guest, GuestImage};
use tidepool_testkit::{Cluster, one_at_a_time};

use crate::clients::{State, sum_of};
use crate::{Stage, VICTIM};
use tidepool_tests::mapped::{MODULES, map, unmap};
use tidepool_tests::rig::VOLUME;

const MINUTE: Duration = Duration::from_secs(60);
/// The feature bit `non-primary`, as the kernel prints it.
const NON_PRIMARY: &str = "0x400";
/// Writes something that was not there before.
const WRITE: &str = "dd if=/dev/urandom bs=65536 count=4 conv=fsync of=";

/// A guest whose disk is the image itself, through QEMU's own RBD driver.
fn boot_on_image(image: &GuestImage, cluster: &Cluster, name: &str) -> Guest {
    let conf = cluster.conf().display();
    image
        .boot_on(&format!("driver=rbd,pool=rbd,image={name},conf={conf}"))
        .expect("the guest boots")
}

/// Maps an image, writes to it, and unmaps it.
fn map_and_write(guest: &mut Guest, cluster: &Cluster, image: &str) {
    let (said, status) = map(guest, cluster, image, "");
    let log = guest.run("dmesg | tail -n 5", MINUTE).expect("a log");
    assert_eq!(status, 0, "{said} {log}");
    guest.run(&format!("{WRITE}/dev/rbd0"), 3 * MINUTE).expect("the kernel's client writes");
    unmap(guest, 0);
}

/// Neither can do anything to a guarded image but read it.
fn try_guests(stage: &Stage, image: &GuestImage, kernel: &mut Guest, when: &str) {
    let name = stage.images[0];
    let before = State::of(&stage.cluster, name).expect("the image can be read");
    let mut vm = boot_on_image(image, &stage.cluster, name);
    let (said, status) =
        vm.run_status(&format!("{WRITE}/dev/vda"), MINUTE).expect("the guest answers");
    println!(
        "{when:10} {:26} status {status}: {}",
        "qemu, a VM on the image",
        said.replace('\n', " / ")
    );
    assert_ne!(status, 0, "a write that reaches no image is an error: {said}");
    vm.run("dd if=/dev/vda of=/dev/null bs=65536 count=4", MINUTE).expect("it can be read");
    vm.kill().expect("kill");

    let (said, status) = map(kernel, &stage.cluster, name, "");
    let log = kernel.run("dmesg | grep rbd: | tail -n 1", MINUTE).expect("a log");
    println!("{when:10} {:26} status {status}: {} / {}", "krbd map", said.trim(), log.trim());
    assert_ne!(status, 0, "it is mapped for writing");
    assert!(log.contains("unsupported features") && log.contains(NON_PRIMARY), "{log}");
    let (said, status) = map(kernel, &stage.cluster, name, ",ro");
    println!("{when:10} {:26} status {status}: {}", "krbd map -o ro", said.trim());
    if status == 0 {
        kernel
            .run("dd if=/dev/rbd0 of=/dev/null bs=65536 count=4", MINUTE)
            .expect("it can be read");
        let (said, status) =
            kernel.run_status(&format!("{WRITE}/dev/rbd0"), MINUTE).expect("an answer");
        assert_ne!(status, 0, "{said}");
        unmap(kernel, 0);
    }
    assert_eq!(State::of(&stage.cluster, name).expect("the image can be read"), before);
}

impl Stage {
    /// Starts the daemon again, drains, and gives the images back.
    fn give_back(&mut self) {
        self.rig.daemon.start().expect("its own cache takes the images back");
        for volume in [VOLUME, VICTIM] {
            self.rig
                .admin
                .call("DELETE", &format!("/v1/volumes/{volume}"), None)
                .expect("it is given back");
        }
        assert!(self.rig.daemon.terminate().expect("it ends").success());
        for image in self.images {
            let sum = self.cluster.rbd_checksum(image).expect("rbd export");
            assert_eq!(sum, sum_of(&self.model), "nothing is lost: {image}");
        }
    }
}

#[test]
#[ignore = "boots two guests: make guard"]
fn g6_neither_a_vm_nor_the_kernels_client_on_the_image_itself_changes_a_byte() {
    let _turn = one_at_a_time();
    let image = GuestImage::build_bare(&MODULES).expect("a guest's image");
    let mut kernel = image.boot_on_network(&[]).expect("the guest boots");
    kernel.join_loopback().expect("a network");
    println!("kernel     {}", kernel.run("uname -r", MINUTE).expect("uname").trim());
    let mut stage = Stage::new();
    // Without a guard they work: what fails below fails because of it.
    map_and_write(&mut kernel, &stage.cluster, "other");

    try_guests(&stage, &image, &mut kernel, "served");
    stage.kill_dirty();
    try_guests(&stage, &image, &mut kernel, "killed");
    stage.wait_forgotten(&stage.images);
    try_guests(&stage, &image, &mut kernel, "forgotten");

    stage.give_back();
    let name = stage.images[0];
    let mut vm = boot_on_image(&image, &stage.cluster, name);
    vm.run(&format!("{WRITE}/dev/vda"), MINUTE).expect("a VM writes to the plain image");
    vm.kill().expect("kill");
    map_and_write(&mut kernel, &stage.cluster, name);
}

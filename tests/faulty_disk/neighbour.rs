//! An image whose device stands still keeps its own volume waiting, and no other one.

use std::fs::File;
use std::time::Duration;

use tidepool_cluster::device::faults::{Act, Remains};
use tidepool_cluster::device::model::Kind;
use tidepool_cluster::device::{Emulated, preset};
use tidepool_testkit::nbd::{self, Client, Command, FLUSH, READ, WRITE};
use tidepool_testkit::{Scratch, one_at_a_time};
use tidepool_tests::rig::{MIB, Rig, RigOptions};

/// Size of each image.
const IMAGE_BYTES: u64 = 64 * MIB;
/// Requests that wait for the device: more than the kernel has threads at first for operations that
/// may sleep, four for each processor.
const REQUESTS: u64 = 256;
/// Writes that are sent at once; the daemon takes so many of a connection.
const WRITES: u64 = 64;
/// So long does each of them take.
const STANDS_STILL: Duration = Duration::from_secs(600);
/// Longest wait for the answers of the other volume.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// A daemon with two volumes: `slow` on a device of its own, and `own`.
struct Neighbours {
    // The kernel keeps a killed daemon until its device has answered.
    device: Emulated,
    rig: Rig,
}

impl Neighbours {
    fn new() -> Neighbours {
        let scratch = Scratch::new("neighbour").expect("a directory");
        let spec = preset::find("ssd-sata-plp").expect("a class").spec;
        let backing = scratch.join("slow.backing");
        let device =
            Emulated::start(spec, IMAGE_BYTES + 16 * MIB, &[], &backing, &scratch.join("slow"));
        let device = device.expect("a device");
        device.pause(true);
        let (slow, own) = (device.directory().join("image"), scratch.join("image"));
        for image in [&slow, &own] {
            // What was never written is a hole, for which no device is asked.
            std::fs::write(image, vec![7; IMAGE_BYTES as usize]).expect("an image");
            File::open(image).and_then(|file| file.sync_all()).expect("it is stable");
        }
        let volumes = [("slow", &slow), ("own", &own)];
        let volumes =
            volumes.map(|(name, image)| (name.to_string(), format!("file:{}", image.display())));
        let options =
            RigOptions { cache_bytes: 256 * MIB, volumes: volumes.into(), extra: Vec::new() };
        let mut rig = Rig::within(scratch, &options).expect("a rig");
        rig.daemon.start().expect("it starts");
        Neighbours { device, rig }
    }

    /// A client of the volume beside the one that is going to stand still.
    fn other_client(&self) -> Client {
        let client = Client::connect(&self.rig.socket, "own").expect("a connection");
        client.give_up_after(ANSWER_LIMIT).expect("a limit");
        client
    }
}

/// Writes, flushes and reads.
fn goes_on(client: &mut Client) {
    for block in 0..64 {
        client.write(block * 4096, &[block as u8; 4096]).expect("a write is answered");
        client.flush().expect("a flush is answered");
        assert_eq!(
            client.read(32 * MIB + block * 4096, 4096).expect("a read is answered"),
            [7; 4096]
        );
    }
}

/// A device that answers nothing until this is dropped.
struct StandsStill<'a>(&'a Emulated);

impl StandsStill<'_> {
    fn new(device: &Emulated) -> StandsStill<'_> {
        device.pause(false);
        device.lengthen(STANDS_STILL);
        StandsStill(device)
    }
}

impl Drop for StandsStill<'_> {
    fn drop(&mut self) {
        self.0.lengthen(Duration::ZERO);
        self.0.pause(true);
    }
}

#[test]
fn g8_an_image_whose_reads_stand_still_keeps_no_other_volume_waiting() {
    let _turn = one_at_a_time();
    let both = Neighbours::new();
    let mut other = both.other_client();
    let stands_still = StandsStill::new(&both.device);
    let (_, mut sender, mut receiver) =
        nbd::connect(&both.rig.socket, "slow").expect("a connection");
    for number in 0..REQUESTS {
        let command = Command {
            kind: READ,
            flags: 0,
            cookie: number,
            offset: number * (64 << 10),
            len: 4096,
        };
        sender.send(command, &[]).expect("sent");
    }
    goes_on(&mut other);
    // What has waited is answered when the device goes on.
    drop(stands_still);
    let mut data = vec![0; 4096];
    for _ in 0..REQUESTS {
        assert_eq!(receiver.reply().expect("an answer").0, 0);
        receiver.payload(&mut data).expect("its data");
        assert!(data.iter().all(|&byte| byte == 7));
    }
}

#[test]
fn g8_an_image_that_is_written_while_its_flush_stands_still_keeps_no_other_volume_waiting() {
    let _turn = one_at_a_time();
    let both = Neighbours::new();
    let mut other = both.other_client();
    let body = serde_json::json!({ "mode": "write-around" });
    both.rig.admin.call("PATCH", "/v1/volumes/slow", Some(&body)).expect("the mode");
    let (_, mut sender, mut receiver) =
        nbd::connect(&both.rig.socket, "slow").expect("a connection");
    let mut send = |kind, number: u64| {
        let (len, data) =
            if kind == WRITE { (4096, [number as u8; 4096].to_vec()) } else { (0, Vec::new()) };
        let command =
            Command { kind, flags: 0, cookie: number, offset: number * len, len: len as u32 };
        sender.send(command, &data).expect("sent");
    };
    send(WRITE, 0);
    assert_eq!(receiver.reply().expect("an answer").0, 0);
    let faults = both.device.faults();
    faults.plan(|operation| match operation.kind {
        Kind::Flush => Act::Hold(Remains::Nothing),
        _ => Act::Pass,
    });
    let held = Held(&both.device);
    send(WRITE, 1);
    send(FLUSH, 2);
    assert!(faults.wait_held(ANSWER_LIMIT), "no flush reaches the device");
    (3..WRITES).for_each(|number| send(WRITE, number));
    goes_on(&mut other);
    drop(held);
    // The device was gone for a moment: its own volume may say so.
    for _ in 1..WRITES {
        let _ = receiver.reply().expect("an answer");
    }
}

/// A device that holds something until this is dropped.
struct Held<'a>(&'a Emulated);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.faults().disconnect();
        self.0.faults().reconnect();
    }
}

//! `tidepool cache export`: both sides of an image that others have changed below dirty data.

use crate::common::{Daemon, IMAGE_BYTES, Place, run};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::FileExt;
use tidepool_nbd::client::BlockingClient;

const MIB: usize = 1 << 20;
/// Blocks that a client writes.
const WRITTEN: u64 = 1024;
/// Where others write: what is written last, hence dirty in the cache still, however slow this
/// machine's disk is; and what the cache does not know.
const FOREIGN: [u64; 2] = [offset_of(WRITTEN - 1), 15 << 20];

/// Where a client writes the block with this number.
const fn offset_of(number: u64) -> u64 {
    number * 37 % WRITTEN * 8192
}

fn client(place: &Place) -> BlockingClient {
    let uri = format!("nbd+unix:///vm1?socket={}", place.text("nbd.sock"));
    BlockingClient::connect(&uri.parse().expect("a URI")).expect("a connection")
}

/// The volume on an image with this query.
fn start(place: &Place, query: &str) -> Daemon {
    let mut args = place.serve_args();
    let at = args.iter().position(|arg| arg == "--volume").expect("an option");
    args[at + 1].push_str(query);
    args.extend(["--accept-loss".to_owned(), "60s".to_owned()]);
    Daemon::start(args, &place.path("log"))
}

/// Why the daemon does not serve the volume when it is started again.
fn refusal(place: &Place) -> String {
    let (door, admin) =
        (format!("nbd+unix:///?socket={}", place.text("nbd.sock")), place.text("admin.sock"));
    let args = ["serve", "--cache", &place.text("cache"), "--nbd", &door, "--admin", &admin];
    let daemon = Daemon::start(args, &place.path("log"));
    let error = loop {
        let list = run(["volume", "list", "--format", "json", "--admin", &admin]);
        let list: Value = serde_json::from_str(list.done()).expect("JSON");
        match list[0]["error"].as_str() {
            Some(error) => break error.to_owned(),
            None => std::thread::sleep(std::time::Duration::from_millis(50)),
        }
    };
    assert_eq!(daemon.terminate(), Some(0));
    error
}

/// Fills the volume with dirty data all over its first half and zeroes a part; returns what clients
/// see then.
fn write(place: &Place) -> Vec<u8> {
    let mut model = vec![0x5a; IMAGE_BYTES];
    let mut vm = client(place);
    // From here on a write does not wait for stable media.
    vm.flush().expect("flushed");
    for block in 0..WRITTEN {
        let offset = offset_of(block);
        let mut data = [block as u8; 4096];
        data[..8].copy_from_slice(&block.to_le_bytes());
        vm.write(offset, &data).expect("absorbed");
        model[offset as usize..][..4096].copy_from_slice(&data);
    }
    vm.zeroes(9 * MIB as u64, 2 * MIB as u64, false).expect("absorbed");
    model[9 * MIB..11 * MIB].fill(0);
    model
}

/// Writes to the image as another program would.
fn write_behind(place: &Place) {
    let image = fs::File::options().write(true).open(place.path("image")).expect("an image");
    FOREIGN.iter().for_each(|at| image.write_all_at(&[0x66; 4096], *at).expect("written"));
}

fn export(place: &Place, out: &str, image: bool) -> crate::common::Ended {
    let mut args: Vec<String> =
        ["cache", "export", &place.text("cache"), "--volume", "vm1"].map(String::from).into();
    args.extend(["--out".into(), place.text(out), "--format".into(), "json".into()]);
    if image {
        args.extend(["--image".into(), format!("file:{}", place.text("image"))]);
    }
    run(args)
}

fn bytes(value: &Value) -> usize {
    value.as_u64().expect("a number") as usize
}

/// Puts the dirty ranges of a sparse export over an image.
fn apply(ranges: &Value, sparse: &[u8], image: &mut [u8]) {
    for range in ranges.as_array().expect("a list") {
        let (at, len) = (bytes(&range["offset_bytes"]), bytes(&range["length_bytes"]));
        assert!(
            range["zero"] == false || sparse[at..at + len].iter().all(|byte| *byte == 0),
            "{range}"
        );
        image[at..at + len].copy_from_slice(&sparse[at..at + len]);
    }
}

#[test]
fn an_image_that_others_have_changed_is_refused_and_both_sides_are_exported() {
    let place = Place::new();
    // As slow as a pool of disks, so that something is still dirty when the daemon ends.
    let daemon = start(&place, "?emulate=hdd");
    let model = write(&place);
    export(&place, "early", true).refused(1, "in use by process");
    assert_eq!(daemon.terminate(), Some(0));
    let undrained = fs::read(place.path("image")).expect("an image");
    write_behind(&place);
    let told = refusal(&place);
    assert!(
        told.contains("must not be written over it") && told.contains("tidepool cache export"),
        "{told}"
    );

    let before = (
        fs::read(place.path("cache")).expect("a cache"),
        fs::read(place.path("image")).expect("an image"),
    );
    let told: Value = serde_json::from_str(export(&place, "ours", true).done()).expect("JSON");
    let mut ours = fs::read(place.path("ours")).expect("an export");
    let foreign = FOREIGN[1] as usize..FOREIGN[1] as usize + 4096;
    assert_eq!(
        ours[foreign.clone()],
        [0x66; 4096],
        "what the cache does not know comes from the image"
    );
    ours[foreign].fill(0x5a);
    assert!(ours == model, "it is what clients saw");
    assert!(bytes(&told["dirty_bytes"]) > 0 && told["lost_bytes"] == 0, "{}", told["lost"]);

    let told: Value = serde_json::from_str(export(&place, "dirty", false).done()).expect("JSON");
    let sparse = fs::read(place.path("dirty")).expect("an export");
    let mut image = undrained;
    apply(&told["dirty"], &sparse, &mut image);
    assert!(image == model, "the dirty data is all that the image lacked");

    assert!(before.0 == fs::read(place.path("cache")).expect("a cache"), "the cache is only read");
    assert!(before.1 == fs::read(place.path("image")).expect("an image"), "the image is only read");
    export(&place, "ours", true).refused(1, "it exists");
    let pipe = ["cache", "export", &place.text("cache"), "--volume", "vm1", "--out", "-"];
    run(pipe).refused(1, "a pipe has not; name a file");
    let other =
        ["cache", "export", &place.text("cache"), "--volume", "vm2", "--out", &place.text("x")];
    run(other).refused(1, "there is no volume vm2");
    assert!(!place.path("x").exists() && !place.path("x.unfinished").exists());
}

#[test]
fn a_cache_that_was_given_up_and_found_again_still_exports_what_verifies() {
    let place = Place::new();
    fs::write(place.path("gate"), b"").expect("a gate");
    let daemon = start(&place, &format!("?gate={}", place.text("gate")));
    let model = write(&place);
    daemon.kill();
    let image = format!("file:{}", place.text("image"));
    run(["recover", &image, "--accept-loss"]).done();
    write_behind(&place);
    let told = refusal(&place);
    assert!(told.contains("was given up"), "{told}");

    let bad = offset_of(WRITTEN - 2) as usize;
    let block = &model[bad..bad + 4096];
    let mut cache = fs::read(place.path("cache")).expect("a cache");
    let copies: Vec<usize> =
        (0..cache.len()).step_by(4096).filter(|at| cache[*at..*at + 4096] == *block).collect();
    assert!(!copies.is_empty(), "it is in the cache");
    copies.iter().for_each(|at| cache[*at] ^= 1);
    fs::write(place.path("cache"), cache).expect("damaged");

    let ended = export(&place, "ours", true);
    assert_eq!(ended.status, Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("4KiB of its dirty data are lost"), "{}", ended.stderr);
    let told: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    assert_eq!(told["lost"], serde_json::json!([{ "offset_bytes": bad, "length_bytes": 4096 }]));
    let ours = fs::read(place.path("ours")).expect("an export");
    assert!(ours[bad..bad + 4096].iter().all(|byte| *byte == 0), "nothing is made up");
    assert!(ours[..bad] == model[..bad] && ours[bad + 4096..8 * MIB] == model[bad + 4096..8 * MIB]);
}

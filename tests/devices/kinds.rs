//! Every kind of block device in a guest: another one under the name, the right one back, under
//! other names, and after reboots.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tidepool_testkit::guest::{Disk, Equipment, Guest, GuestImage};
use tidepool_testkit::{Scratch, need, one_at_a_time};

/// Longest time of one command in the guest, and of what starts or ends much: only what hangs takes
/// so long.
const COMMAND_MAX: Duration = Duration::from_secs(240);
const START_MAX: Duration = Duration::from_secs(600);

const MIB: u64 = 1 << 20;
/// Size of each device.
const DEVICE_BYTES: u64 = 2 * MIB;
const DEVICE_SECTORS: u64 = DEVICE_BYTES / 512;
/// Where the partition begins.
const PARTITION_AT: u64 = MIB;
/// What is dirty of each: where, and how much.
const DIRTY_AT: usize = 256 << 10;
const DIRTY_BYTES: usize = 64 << 10;

/// Each kind has two devices `a` and `b` of one size, and a volume on whatever stands in its slot.
/// The cache has data for `a`.
const KINDS: [&str; 8] = ["serial", "plain", "part", "dm", "uuid", "nbd", "zram", "loop"];
/// Of these the device is known again when it was taken away and came back while the machine ran.
const KNOWN_AGAIN: [&str; 4] = ["serial", "uuid", "zram", "loop"];
/// Of these it is known after a reboot, too.
const LASTING: [&str; 3] = ["serial", "uuid", "loop"];

/// The content of a device as it was made: a line that names it, over and over.
fn content(name: &str, bytes: usize) -> Vec<u8> {
    format!("{name}\n").into_bytes().into_iter().cycle().take(bytes).collect()
}

/// That of the right one, once everything is drained.
fn drained(kind: &str) -> Vec<u8> {
    let mut content = content(&format!("{kind}-a"), DEVICE_BYTES as usize);
    content[DIRTY_AT..DIRTY_AT + DIRTY_BYTES]
        .copy_from_slice(&self::content(&format!("dirty-{kind}"), DIRTY_BYTES));
    content
}

/// The disks of the guest on the host.
struct Disks {
    scratch: Scratch,
}

impl Disks {
    fn new() -> Disks {
        let disks = Disks { scratch: Scratch::new("devices").expect("a directory") };
        for (name, bytes) in [("data", 256 * MIB), ("base", 4 * DEVICE_BYTES)] {
            File::create(disks.path(name)).and_then(|file| file.set_len(bytes)).expect("a disk");
        }
        run("mke2fs", "e2fsprogs", &["-q", "-F", "-t", "ext4", &disks.text("data")]);
        for which in ["a", "b"] {
            for kind in ["serial", "plain"] {
                let name = format!("{kind}-{which}");
                fs::write(disks.path(&name), content(&name, DEVICE_BYTES as usize))
                    .expect("a disk");
            }
            disks.partitioned(&format!("part-{which}"));
        }
        disks
    }

    /// A disk with one partition. Both disks have one table, with the same uuids, as copies do.
    fn partitioned(&self, name: &str) {
        let file = File::create(self.path(name)).expect("a disk");
        file.set_len(PARTITION_AT + DEVICE_BYTES + MIB).expect("its size");
        let table = format!(
            "label: gpt\nlabel-id: 3f6b2f0e-7c1d-4a52-9d77-2f5a3c8e1b01\n\
             start={}, size={DEVICE_SECTORS}, uuid=3f6b2f0e-7c1d-4a52-9d77-2f5a3c8e1b02\n",
            PARTITION_AT / 512
        );
        let script = self.path("table");
        fs::write(&script, table).expect("a script");
        let line = format!("sfdisk -q {} <{}", self.text(name), script.display());
        need("sfdisk", "fdisk").expect("installed");
        run("sh", "dash", &["-c", &line]);
        file.write_all_at(&content(name, DEVICE_BYTES as usize), PARTITION_AT).expect("written");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Boots with these disks in this order.
    fn boot(&self, image: &GuestImage, names: &[&str]) -> Guest {
        let paths: Vec<PathBuf> = names.iter().map(|name| self.path(name)).collect();
        let disks = paths.iter().zip(names).map(|(path, name)| disk(path, name));
        let mut guest = image.boot_with(&disks.collect::<Vec<_>>()).expect("the guest boots");
        guest
            .run(
                "mkdir -p /data /slots /var/lib/tidepool && mount -t ext4 /dev/vda /data && mkdir -p /data/state /data/want \
                 && mount --bind /data/state /var/lib/tidepool",
                COMMAND_MAX,
            )
            .expect("its own disk");
        // The second one: a disk in memory has no other name than its place among them.
        guest
            .run("cat /sys/class/zram-control/hot_add >/tmp/second", COMMAND_MAX)
            .expect("two disks in memory");
        guest
            .run("for n in 0 1; do echo 2M >/sys/block/zram$n/disksize; done", COMMAND_MAX)
            .expect("their size");
        guest
    }

    /// The device on a disk of the host, byte by byte.
    fn content(&self, name: &str, at: u64) -> Vec<u8> {
        let mut found = vec![0; DEVICE_BYTES as usize];
        File::open(self.path(name))
            .and_then(|file| file.read_exact_at(&mut found, at))
            .expect("read");
        found
    }
}

/// A disk as the guest has it: those whose name says so have a serial number of their own.
fn disk<'a>(path: &'a Path, name: &'a str) -> Disk<'a> {
    let is_named = name.starts_with("serial") || ["data", "base"].contains(&name);
    Disk { file: path, serial: is_named.then_some(name) }
}

fn run(program: &str, package: &str, arguments: &[&str]) {
    need(program, package).expect("installed");
    let output = Command::new(program).args(arguments).output().expect("it runs");
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

/// What the kernel calls the disks in one boot, and the loop device.
struct Names {
    serial: &'static str,
    plain: &'static str,
    part: &'static str,
    base: &'static str,
    looped: &'static str,
}

const FIRST: Names =
    Names { serial: "vdb", plain: "vdc", part: "vdd", base: "vde", looped: "loop0" };
const OTHERS: Names =
    Names { serial: "vdd", plain: "vde", part: "vdc", base: "vdb", looped: "loop3" };

/// Puts one of the two devices of each kind into the slot, those that are whole disks as they are
/// there.
fn set_up(guest: &mut Guest, names: &Names, which: &str) {
    let number = u64::from(which == "b");
    let at = |place: u64| (2 * place + number) * DEVICE_SECTORS;
    let mapped = |name: &str, uuid: &str, at: u64| {
        format!(
            "dmsetup create {name} {uuid} --noudevrules --noudevsync --table '0 {DEVICE_SECTORS} linear /dev/{} {at}'",
            names.base
        )
    };
    for line in [
        mapped("dm", "", at(0)),
        mapped("uuid", &format!("--uuid TIDEPOOL-{which}"), at(1)),
        format!("[ -f /data/nbd-{which} ] || truncate -s {DEVICE_BYTES} /data/nbd-{which}"),
        format!(
            "rm -f /tmp/nbd-{which}.sock; nbdkit -U /tmp/nbd-{which}.sock -P /tmp/nbd-{which}.pid file /data/nbd-{which} </dev/null >/tmp/nbdkit 2>&1 || {{ cat /tmp/nbdkit; false; }}"
        ),
        format!("nbd-client -unix /tmp/nbd-{which}.sock /dev/nbd0 >/tmp/nbd 2>&1"),
        format!("[ -f /data/loop ] || truncate -s {} /data/loop", 2 * DEVICE_BYTES),
        format!(
            "/sbin/losetup -o {} --sizelimit {DEVICE_BYTES} /dev/{} /data/loop",
            number * DEVICE_BYTES,
            names.looped
        ),
        format!(
            "minor() {{ dmsetup info -c --noheadings -o minor $1; }}; \
             for slot in serial:{} plain:{} part:{}1 dm:dm-$(minor dm) uuid:dm-$(minor uuid) nbd:nbd0 zram:zram{number} loop:{}; do \
             ln -sfn /dev/${{slot#*:}} /slots/${{slot%%:*}} && [ -b /slots/${{slot%%:*}} ] || break; done; [ -b /slots/loop ]",
            names.serial, names.plain, names.part, names.looped
        ),
    ] {
        guest.run(&line, COMMAND_MAX).unwrap_or_else(|error| panic!("{line}: {error}"));
    }
}

/// Takes them away again, the disks of the machine and those in memory excepted.
fn tear_down(guest: &mut Guest, names: &Names, which: &str) {
    for line in [
        "dmsetup remove --noudevrules --noudevsync dm && dmsetup remove --noudevrules --noudevsync uuid"
            .to_owned(),
        "nbd-client -d /dev/nbd0 >/tmp/nbd 2>&1; while [ -e /sys/block/nbd0/pid ]; do sleep 0.1; done"
            .to_owned(),
        format!(
            "kill $(cat /tmp/nbd-{which}.pid); while [ -d /proc/$(cat /tmp/nbd-{which}.pid) ]; do sleep 0.1; done"
        ),
        format!(
            "/sbin/losetup -d /dev/{0}; while [ -e /sys/block/{0}/loop ]; do sleep 0.1; done",
            names.looped
        ),
    ] {
        guest.run(&line, COMMAND_MAX).unwrap_or_else(|error| panic!("{line}: {error}"));
    }
}

/// Has the daemon started, with its backends standing still or not, and waits until each volume was
/// tried. Their state and their trouble.
fn serve(guest: &mut Guest, stands_still: bool) -> BTreeMap<String, (String, String)> {
    let gate = if stands_still { "touch /data/gate" } else { "rm -f /data/gate" };
    let volumes: Vec<String> =
        KINDS.map(|kind| format!("--volume '{kind}=file:/slots/{kind}?gate=/data/gate'")).into();
    let line = format!(
        "{gate}; tidepool serve --cache /data/cache --cache-size 64MiB --nbd 'nbd+unix:///?socket=/tmp/nbd.sock' \
         --admin /tmp/admin.sock --accept-loss 60m {} </dev/null >/tmp/out 2>/tmp/log & daemon=$!",
        volumes.join(" ")
    );
    guest.run(&line, COMMAND_MAX).expect("started");
    let wait = "until grep -q '^ready' /tmp/out; do [ -d /proc/$daemon ] || break; sleep 0.2; done; grep -q '^ready' /tmp/out";
    if let Err(error) = guest.run(wait, START_MAX) {
        panic!("{error}: {}", guest.run("cat /tmp/log", COMMAND_MAX).unwrap_or_default());
    }
    loop {
        let states = states(guest);
        if states.values().all(|(state, _)| state != "opening") {
            return states;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn states(guest: &mut Guest) -> BTreeMap<String, (String, String)> {
    let told = guest
        .run("tidepool status --format json --admin /tmp/admin.sock", COMMAND_MAX)
        .expect("a status");
    let told: Value = serde_json::from_str(&told).unwrap_or_else(|error| panic!("{error}: {told}"));
    let volumes = told["volumes"].as_array().expect("a list").iter();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    volumes
        .map(|volume| (text(&volume["name"]), (text(&volume["state"]), text(&volume["error"]))))
        .collect()
}

/// Serves what may be served: these kinds, and no others. The others wait until somebody names the
/// device.
#[track_caller]
fn serves_only(states: &BTreeMap<String, (String, String)>, kinds: &[&str], when: &str) {
    for kind in KINDS {
        let (state, error) = &states[kind];
        match kinds.contains(&kind) {
            true => {
                assert!(state == "serving" || state == "full", "{when}: {kind} is {state}: {error}")
            }
            false => assert!(
                state == "unavailable" && error.contains("tidepool confirm"),
                "{when}: {kind} is {state}: {error}"
            ),
        }
    }
}

fn kill(guest: &mut Guest) {
    guest.run("kill -9 $daemon; wait $daemon; sync", COMMAND_MAX).ok();
    guest.run("[ ! -d /proc/$daemon ]", COMMAND_MAX).expect("it is gone");
}

/// The devices in the slots have what they were made with.
#[track_caller]
fn are_untouched(guest: &mut Guest, kinds: &[&str], which: &str) {
    for kind in kinds {
        let line = format!("cmp /slots/{kind} /data/want/{kind}-{which}");
        if let Err(error) = guest.run(&line, COMMAND_MAX) {
            panic!("{kind}-{which} was written to: {error}");
        }
    }
}

/// Makes what the guest makes itself, and what all are to be compared with.
fn fill(guest: &mut Guest, which: &str) {
    let each =
        |kinds: &[&str], work: &str| format!("for kind in {}; do {work}; done", kinds.join(" "));
    let want = format!("yes $kind-{which} | head -c {DEVICE_BYTES} >/data/want/$kind-{which}");
    guest.run(&each(&KINDS, &want), COMMAND_MAX).expect("what is wanted");
    let made = ["dm", "uuid", "nbd", "zram", "loop"];
    let copy = format!(
        "dd if=/data/want/$kind-{which} of=/slots/$kind bs=65536 conv=notrunc,fsync 2>/tmp/dd || break"
    );
    guest.run(&each(&made, &copy), COMMAND_MAX).expect("filled");
    are_untouched(guest, &KINDS, which);
}

#[test]
#[ignore = "three boots of a guest that is emulated: make long"]
fn g6_of_eight_kinds_of_devices_only_the_right_one_gets_what_a_cache_holds() {
    let _turn = one_at_a_time();
    let disks = Disks::new();
    need("nbdkit", "nbdkit").expect("installed");
    let plugins = Command::new("nbdkit").arg("--dump-config").output().expect("nbdkit runs");
    let plugins = String::from_utf8_lossy(&plugins.stdout).into_owned();
    let plugins =
        plugins.lines().find_map(|line| line.strip_prefix("plugindir=")).expect("a directory");
    let plugin = Path::new(plugins).join("nbdkit-file-plugin.so");
    let image = GuestImage::build_equipped(Equipment {
        modules: &["loop", "nbd", "lzo_rle", "zram", "dm_mod"],
        programs: &[
            ("dmsetup", "dmsetup"),
            ("nbd-client", "nbd-client"),
            ("nbdkit", "nbdkit"),
            ("losetup", "mount"),
        ],
        files: &[&plugin],
        tidepool: true,
        ..Equipment::default()
    })
    .expect("a guest's image");

    // The cache has dirty data for each.
    let right = ["data", "serial-a", "plain-a", "part-a", "base"];
    let mut guest = disks.boot(&image, &right);
    set_up(&mut guest, &FIRST, "a");
    fill(&mut guest, "a");
    let told = guest.run("tidepool check file:/slots/nbd", COMMAND_MAX).expect("a check");
    assert!(told.contains("reached over NBD"), "{told}");
    let told = guest.run("tidepool check file:/slots/loop", COMMAND_MAX).expect("a check");
    assert!(!told.contains("reached over"), "{told}");
    let states = serve(&mut guest, false);
    serves_only(&states, &KINDS, "at first");
    // The guest's kernel looks for partitions when a disk is opened first, which is to be over when
    // the backends stand still.
    let clients = |work: &str| {
        let kinds = KINDS.join(" ");
        format!(
            "n=0; for kind in {kinds}; do n=$((n + 1)); {work} || break; done; [ $n = {} ]",
            KINDS.len()
        )
    };
    let connect = clients(
        "nbd-client -unix /tmp/nbd.sock /dev/nbd$n -N $kind >/tmp/nbd 2>&1 && head -c 4096 /dev/nbd$n >/tmp/first",
    );
    guest.run(&connect, COMMAND_MAX).expect("connected");
    let write = clients(&format!(
        "yes dirty-$kind | head -c {DIRTY_BYTES} >/tmp/dirty; dd if=/tmp/dirty of=/dev/nbd$n bs={DIRTY_BYTES} seek={} conv=notrunc,fsync 2>/tmp/dd",
        DIRTY_AT / DIRTY_BYTES
    ));
    guest.run(&format!("touch /data/gate; {write}"), COMMAND_MAX).expect("written");
    guest
        .run(&clients("nbd-client -d /dev/nbd$n >/tmp/nbd 2>&1"), COMMAND_MAX)
        .expect("disconnected");
    kill(&mut guest);
    are_untouched(&mut guest, &KINDS, "a");

    // Another device of its kind has each one's name, while the machine runs.
    tear_down(&mut guest, &FIRST, "a");
    change_disks(&mut guest, &disks, "b");
    set_up(&mut guest, &FIRST, "b");
    fill(&mut guest, "b");
    let states = serve(&mut guest, false);
    serves_only(&states, &[], "swapped");
    kill(&mut guest);
    are_untouched(&mut guest, &KINDS, "b");

    // The right ones are back.
    tear_down(&mut guest, &FIRST, "b");
    change_disks(&mut guest, &disks, "a");
    set_up(&mut guest, &FIRST, "a");
    are_untouched(&mut guest, &KINDS, "a");
    let states = serve(&mut guest, true);
    serves_only(&states, &KNOWN_AGAIN, "back");
    kill(&mut guest);
    are_untouched(&mut guest, &KINDS, "a");
    guest.kill().expect("the power goes");

    // The machine comes back with the others under the names.
    let mut guest = disks.boot(&image, &["data", "serial-b", "plain-b", "part-b", "base"]);
    set_up(&mut guest, &FIRST, "b");
    guest.run("cat /data/want/zram-b >/slots/zram", COMMAND_MAX).expect("filled");
    let states = serve(&mut guest, false);
    serves_only(&states, &[], "swapped, after a reboot");
    kill(&mut guest);
    are_untouched(&mut guest, &KINDS, "b");
    guest.kill().expect("the power goes");

    // And once more, with the right ones under other names.
    let mut guest = disks.boot(&image, &["data", "base", "part-a", "serial-a", "plain-a"]);
    set_up(&mut guest, &OTHERS, "a");
    // What was in memory was kept elsewhere.
    guest.run("cat /data/want/zram-a >/slots/zram", COMMAND_MAX).expect("filled");
    are_untouched(&mut guest, &KINDS, "a");
    let states = serve(&mut guest, false);
    serves_only(&states, &LASTING, "under other names, after a reboot");
    let unnamed: Vec<&str> = KINDS.into_iter().filter(|kind| !LASTING.contains(kind)).collect();
    are_untouched(&mut guest, &unnamed, "a");
    // Somebody knows which device each was, by what its record says that it was called.
    for (kind, name) in
        [("plain", "vdc"), ("part", "vdd1"), ("dm", "dm-0"), ("nbd", "nbd0"), ("zram", "zram0")]
    {
        let record =
            format!("$(grep -l '\"name\": *\"{name}\"' /var/lib/tidepool/device-*.tidepool)");
        let line = format!("tidepool confirm file:/slots/{kind} --record {record}");
        guest.run(&line, COMMAND_MAX).unwrap_or_else(|error| panic!("{kind}: {error}"));
    }
    while self::states(&mut guest).values().any(|(state, _)| state == "unavailable") {
        std::thread::sleep(Duration::from_millis(200));
    }
    guest
        .run("tidepool volume drain --all --admin /tmp/admin.sock >/tmp/drained", START_MAX)
        .expect("drained");
    guest.run("kill $daemon; wait $daemon", START_MAX).expect("it ends");
    for kind in KINDS {
        let line = format!(
            "yes dirty-{kind} | head -c {DIRTY_BYTES} | dd of=/data/want/{kind}-a bs={DIRTY_BYTES} seek={} conv=notrunc 2>/tmp/dd",
            DIRTY_AT / DIRTY_BYTES
        );
        guest.run(&line, COMMAND_MAX).expect("what is wanted");
    }
    are_untouched(&mut guest, &KINDS, "a");
    guest.run("sync", COMMAND_MAX).expect("on the host's disks");
    guest.kill().expect("killed");

    // The same, as the host sees it.
    for (kind, at) in [("serial", 0), ("plain", 0), ("part", PARTITION_AT)] {
        let [a, b] = ["a", "b"].map(|which| format!("{kind}-{which}"));
        assert!(disks.content(&a, at) == drained(kind), "{a}");
        assert!(disks.content(&b, at) == content(&b, DEVICE_BYTES as usize), "{b}");
    }
    for (place, (kind, which)) in
        [("dm", "a"), ("dm", "b"), ("uuid", "a"), ("uuid", "b")].into_iter().enumerate()
    {
        let wanted = match which {
            "a" => drained(kind),
            _ => content(&format!("{kind}-b"), DEVICE_BYTES as usize),
        };
        assert!(disks.content("base", place as u64 * DEVICE_BYTES) == wanted, "{kind}-{which}");
    }
}

/// Changes the disks of the machine that stand for themselves, while it runs.
fn change_disks(guest: &mut Guest, disks: &Disks, which: &str) {
    for (number, (kind, name)) in
        [("serial", FIRST.serial), ("plain", FIRST.plain), ("part", FIRST.part)]
            .into_iter()
            .enumerate()
    {
        let (path, called) = (disks.path(&format!("{kind}-{which}")), format!("{kind}-{which}"));
        guest.change_disk(number + 1, name, &disk(&path, &called)).expect("changed");
    }
    // The kernel makes the disk's node first, and those of its partitions when it has read the
    // table.
    let there = format!("[ -b /dev/{}1 ]", FIRST.part);
    let wait = format!(
        "n=0; until {there}; do n=$((n + 1)); [ $n -lt 300 ] || break; sleep 0.1; done; {there}"
    );
    guest.run(&wait, COMMAND_MAX).expect("a partition");
}

//! The service as it is shipped, under a real systemd in a guest: from the first start to the end
//! of its machine.

use std::time::Duration;

use tidepool_testkit::guest::{Disk, Equipment, Guest, GuestImage, Own, machine};
use tidepool_testkit::{Scratch, one_at_a_time};

/// Longest time of one command in the guest, and of what starts or ends much: only what hangs takes
/// so long.
const COMMAND_MAX: Duration = Duration::from_secs(240);
const START_MAX: Duration = Duration::from_secs(600);

const UNIT: &str = include_str!("../../packaging/tidepool.service");
const SETTINGS: &str = r#"
cache = "/var/lib/tidepool/cache"
cache-size = "64MiB"
nbd = ["nbd+unix:///?socket=/run/tidepool/nbd.sock"]
admin = "/run/tidepool/admin.sock"
metrics = "127.0.0.1:9464"
accept-loss = "60m"
[volume]
vm1 = "file:/srv/images/vm1?gate=/srv/gate"
late = "file:/srv/images/late"
"#;
/// Images on what systemd takes for a network file system.
const FSTAB: &str = "/var/images /srv/images none bind,_netdev 0 0\n";
/// What shuts guests down when their host does: while it runs, their volumes must be there.
const GUESTS: &str = "[Unit]
Description=Stands for libvirt-guests
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/true
ExecStop=/usr/bin/sh /etc/guests-end
";
const GUESTS_END: &str =
    "echo guests-see $(tidepool status | grep -c '^vm1 .*serving') of their disks\n";

/// Waits until the machine has started what it starts.
fn has_started(guest: &mut Guest) {
    let (state, _) =
        guest.run_status("systemctl is-system-running --wait", START_MAX).expect("it starts");
    let failed = guest
        .run("systemctl --failed --no-legend --plain --no-pager", COMMAND_MAX)
        .expect("a list");
    let mounted =
        guest.run_status("grep -q ^images /srv/images/readme", COMMAND_MAX).expect("an answer").1
            == 0;
    if !mounted || state.trim() != "running" {
        let log = guest.run("journalctl -b --no-pager -o cat -n 150", COMMAND_MAX).expect("a log");
        panic!("{}, failed {failed:?}: {log}", state.trim());
    }
}

/// A property of the service.
fn property(guest: &mut Guest, name: &str) -> String {
    let told = guest
        .run(&format!("systemctl show -P {name} tidepool"), COMMAND_MAX)
        .expect("systemctl answers");
    told.trim().to_owned()
}

/// Waits until a property has a value.
fn wait_for(guest: &mut Guest, name: &str, value: &str) {
    let look = format!("[ \"$(systemctl show -P {name} tidepool)\" = \"{value}\" ]");
    let wait = format!(
        "n=0; until {look}; do n=$((n + 1)); [ $n -lt 1500 ] || break; sleep 0.2; done; {look}"
    );
    if let Err(error) = guest.run(&wait, START_MAX) {
        let log = guest.run("systemctl status tidepool; journalctl -n 20 --no-pager", COMMAND_MAX);
        panic!("{name} is not {value:?}: {error}: {}", log.unwrap_or_default());
    }
}

/// Runs something with a volume as `/dev/nbd0`.
#[track_caller]
fn with_volume(guest: &mut Guest, volume: &str, work: &str) -> String {
    let connect =
        format!("nbd-client -unix /run/tidepool/nbd.sock /dev/nbd0 -N {volume} >/tmp/nbd 2>&1");
    guest.run(&connect, COMMAND_MAX).expect("a client of the volume");
    let told = guest.run(work, COMMAND_MAX).expect("the volume works");
    guest.run("nbd-client -d /dev/nbd0 >/tmp/nbd 2>&1", COMMAND_MAX).expect("disconnected");
    told
}

/// Writes a text over and over to the first blocks of a volume, whole blocks at a time: nothing is
/// read for that.
#[track_caller]
fn write(guest: &mut Guest, volume: &str, text: &str) {
    let work = format!(
        "yes {text} | head -c 1048576 >/tmp/data; dd if=/tmp/data of=/dev/nbd0 bs=65536 conv=fsync 2>/tmp/dd"
    );
    with_volume(guest, volume, &work);
}

/// Whether they hold it. Nothing is read ahead, which could be only in an image that stands still.
#[track_caller]
fn holds(guest: &mut Guest, volume: &str, text: &str) -> bool {
    let work = format!(
        "echo 3 >/proc/sys/vm/drop_caches; yes {text} | head -c 1048576 >/tmp/wanted; dd if=/dev/nbd0 bs=65536 count=16 iflag=direct 2>/tmp/dd | cmp - /tmp/wanted && echo same"
    );
    with_volume(guest, volume, &work).contains("same")
}

/// The places of these texts in a log, which must have them in this order.
#[track_caller]
fn in_order(log: &str, texts: &[&str]) {
    let mut from = 0;
    for text in texts {
        match log[from..].find(text) {
            Some(place) => from += place + text.len(),
            None => panic!("no {text:?} behind {}: {log}", &log[..from]),
        }
    }
}

#[test]
#[ignore = "two boots of a whole machine: make long"]
fn the_service_starts_serves_and_ends_under_systemd() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("systemd").expect("a directory");
    let disk = scratch.join("disk");
    let own = [
        ("/etc/systemd/system/tidepool.service", UNIT),
        ("/etc/tidepool/tidepool.toml", SETTINGS),
        ("/etc/fstab", FSTAB),
        ("/etc/systemd/system/libvirt-guests.service", GUESTS),
        ("/etc/guests-end", GUESTS_END),
        ("/var/images/readme", "images\n"),
        ("/srv/images/readme", "not mounted\n"),
    ];
    let programs = [("nbd-client", "nbd-client"), ("mount", "mount"), ("umount", "mount")];
    let own = own.map(|(path, content)| Own { path, content });
    machine(&disk, &programs, &own, &["libvirt-guests.service"]).expect("a machine");
    let image = GuestImage::build_equipped(Equipment { modules: &["nbd"], ..Equipment::default() })
        .expect("a guest's image");
    let disks = [Disk { file: &disk, serial: None }];
    let mut guest = image.boot_machine(&disks).expect("the guest boots");
    has_started(&mut guest);
    guest
        .run("systemd-analyze verify --man=no /etc/systemd/system/tidepool.service", COMMAND_MAX)
        .expect("valid");
    guest.run("truncate -s 16M /var/images/vm1", COMMAND_MAX).expect("an image");

    // The first start: one of two images is there. It is over when the daemon says that it is
    // ready.
    guest
        .run("systemctl enable tidepool 2>/tmp/enable && systemctl start tidepool", START_MAX)
        .expect("started");
    assert_eq!(property(&mut guest, "ActiveState"), "active");
    assert_eq!(property(&mut guest, "WatchdogUSec"), "1min");
    wait_for(&mut guest, "StatusText", "serving 1 of 2 volumes");
    let first = property(&mut guest, "MainPID");
    let process =
        guest.run(&format!("grep -E 'Cap|Seccomp:|NoNew' /proc/{first}/status"), COMMAND_MAX);
    let process = process.expect("its state");
    // CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_IPC_LOCK, CAP_SYS_NICE.
    let capabilities = 1 << 1 | 1 << 2 | 1 << 14 | 1 << 23;
    for line in ["NoNewPrivs:\t1", "Seccomp:\t2", &format!("CapBnd:\t{capabilities:016x}")] {
        assert!(process.contains(line), "no {line:?}: {process}");
    }
    let (said, status) = guest
        .run_status(&format!("nsenter -t {first} -m touch /usr/here"), COMMAND_MAX)
        .expect("ran");
    assert!(status != 0 && said.contains("Read-only"), "{said}");
    let modes = "stat -c '%a %G %n' /run/tidepool/nbd.sock /run/tidepool/admin.sock /var/lib/tidepool/cache";
    let modes = guest.run(modes, COMMAND_MAX).expect("there");
    for line in [
        "700 kvm /run/tidepool/nbd.sock",
        "600 kvm /run/tidepool/admin.sock",
        "600 kvm /var/lib/tidepool/cache",
    ] {
        assert!(modes.contains(line), "no {line:?}: {modes}");
    }

    // In its sandbox it serves, and nobody else reads what it keeps beside the image until that has
    // it.
    write(&mut guest, "vm1", "first");
    assert!(holds(&mut guest, "vm1", "first"));
    guest.run("tidepool volume drain vm1 >/tmp/drain", COMMAND_MAX).expect("drained");
    // Who has changed what is written down there.
    guest
        .run(
            "tidepool volume set vm1 --dirty-max 16MiB >/tmp/set && stat -c '%a %n' /var/lib/tidepool/audit.log | grep '^600 ' && grep '\"uid\":0.*volume set vm1.*done' /var/lib/tidepool/audit.log",
            COMMAND_MAX,
        )
        .expect("an audit line");
    guest
        .run(
            "yes first | head -c 1048576 >/tmp/wanted; cmp -n 1048576 /tmp/wanted /var/images/vm1",
            COMMAND_MAX,
        )
        .expect("the image has it");

    // Killed with what the image lacks, it is started again and serves it.
    guest.run("touch /srv/gate", COMMAND_MAX).expect("a closed gate");
    write(&mut guest, "vm1", "second");
    guest.run(&format!("kill -9 {first}"), COMMAND_MAX).expect("killed");
    wait_for(&mut guest, "NRestarts", "1");
    wait_for(&mut guest, "ActiveState", "active");
    wait_for(&mut guest, "StatusText", "serving 1 of 2 volumes");
    let second = property(&mut guest, "MainPID");
    assert!(second != first && second != "0", "{first}, {second}");
    assert!(holds(&mut guest, "vm1", "second"));

    // The other image comes, and is served by the process that is there.
    guest.run("truncate -s 16M /var/images/late", COMMAND_MAX).expect("an image");
    wait_for(&mut guest, "StatusText", "serving 2 of 2 volumes");
    write(&mut guest, "late", "late");
    assert_eq!(property(&mut guest, "MainPID"), second);

    // A mistake in the configuration is not tried again and again.
    guest
        .run(
            "cp /etc/tidepool/tidepool.toml /tmp/ && echo 'cashe = 1' >>/etc/tidepool/tidepool.toml",
            COMMAND_MAX,
        )
        .expect("a mistake");
    guest.run("rm /srv/gate", COMMAND_MAX).expect("an open gate");
    let (_, status) = guest
        .run_status("systemctl restart tidepool 2>/tmp/said", START_MAX)
        .expect("systemctl ends");
    assert_ne!(status, 0, "it does not start");
    assert_eq!(property(&mut guest, "ExecMainStatus"), "2");
    assert_eq!(
        (property(&mut guest, "ActiveState"), property(&mut guest, "SubState")),
        ("failed".into(), "failed".into())
    );
    let log = guest.run("journalctl -u tidepool -n 5 --no-pager", COMMAND_MAX).expect("a log");
    assert!(log.contains("cannot use the configuration"), "{log}");
    guest
        .run("cp /tmp/tidepool.toml /etc/tidepool/ && systemctl start tidepool", START_MAX)
        .expect("mended");
    wait_for(&mut guest, "StatusText", "serving 2 of 2 volumes");
    assert!(holds(&mut guest, "vm1", "second"));

    // The end of the machine: guests first, then the daemon, then what its images are on. The first
    // flush after a start reaches the image.
    write(&mut guest, "vm1", "second");
    guest.run("touch /srv/gate", COMMAND_MAX).expect("a closed gate");
    write(&mut guest, "vm1", "third");
    guest
        .run("systemctl disable tidepool 2>/tmp/disable", COMMAND_MAX)
        .expect("it does not start with the machine");
    guest.run("systemctl poweroff", COMMAND_MAX).expect("asked to end");
    guest.wait_end(START_MAX).expect("it ends");
    let mut guest = image.boot_machine(&disks).expect("the guest boots again");
    has_started(&mut guest);
    let log = guest
        .run("journalctl -b -1 --no-pager -o cat", COMMAND_MAX)
        .expect("the log of its last life");
    let end =
        &log[log.rfind("guests-see").unwrap_or_else(|| panic!("nothing of the guests: {log}"))..];
    in_order(
        end,
        &[
            "guests-see 1 of their disks",
            "stopping: flush and checkpoint",
            "tidepool.service: Deactivated successfully",
            "Unmounting srv-images.mount",
            "Unmounted srv-images.mount",
        ],
    );
    // What systemd says itself comes to the journal in another way.
    in_order(
        end,
        &[
            "guests-see 1 of their disks",
            "Stopping tidepool.service",
            "Unmounting srv-images.mount",
        ],
    );
    assert!(!log.contains("Failed unmounting"), "{log}");

    // What the image lacked then comes with the next start.
    guest.run("rm /srv/gate; systemctl start tidepool", START_MAX).expect("started");
    wait_for(&mut guest, "StatusText", "serving 2 of 2 volumes");
    assert!(holds(&mut guest, "vm1", "third") && holds(&mut guest, "late", "late"));
    guest.kill().expect("killed");
}

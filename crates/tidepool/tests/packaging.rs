//! What is shipped beside the command works with it.

use std::path::PathBuf;
use std::process::Command;
use tidepool_daemon::config::Config;
use tidepool_daemon::service::Plan;

fn packaged(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(name)
}

#[test]
fn the_example_configuration_is_valid_as_shipped_and_with_its_comments_opened() {
    let path = packaged("tidepool.toml");
    let plan = Plan::new(Config::read(&path).expect("valid")).expect("a plan");
    assert!(plan.volumes().is_empty());

    let text = std::fs::read_to_string(&path).expect("readable");
    // Settings that are commented out stand directly behind their #; prose has a space there.
    let opened: Vec<&str> = text
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(setting) if !setting.starts_with(' ') => setting,
            _ => line,
        })
        .collect();
    let plan = Plan::new(Config::parse(&path, &opened.join("\n")).expect("valid")).expect("a plan");
    let names: Vec<&str> = plan.volumes().iter().map(|volume| volume.name()).collect();
    assert_eq!(names, ["vm1", "vm2"]);
    assert_eq!(plan.accept_loss().map(|loss| loss.to_string()).as_deref(), Some("5s"));
}

#[test]
fn the_example_of_own_sockets_is_valid() {
    let path = packaged("../docs/examples/own-sockets.toml");
    let plan = Plan::new(Config::read(&path).expect("valid")).expect("a plan");
    assert!(
        plan.volumes().len() == 3 && plan.volumes().iter().all(|volume| volume.socket().is_some())
    );
}

#[test]
fn the_unit_is_accepted_by_systemd() {
    // The unit names the installed command; here it is the built one.
    let unit = std::fs::read_to_string(packaged("tidepool.service")).expect("readable");
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("tidepool.service");
    let unit = unit.replace("/usr/bin/tidepool", env!("CARGO_BIN_EXE_tidepool"));
    std::fs::write(&path, unit).expect("written");
    match Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let about_it: Vec<&str> =
                said.lines().filter(|line| line.contains("tidepool.service")).collect();
            assert!(output.status.success() && about_it.is_empty(), "{said}");
        }
        Err(error) => eprintln!("not verified: systemd-analyze: {error}"),
    }
}

/// The exposure, in tenths, that `systemd-analyze security` may find. What is left: it is root, for
/// devices and images of anybody, it uses the network and disks, and it locks memory.
const EXPOSURE_MAX: &str = "31";

#[test]
fn the_unit_gives_the_daemon_no_more_than_it_needs() {
    let unit = std::fs::read_to_string(packaged("tidepool.service")).expect("readable");
    assert!(unit.lines().any(|line| line == "LimitCORE=0"), "what guests write is in no core file");
    let watchdog =
        unit.lines().find_map(|line| line.strip_prefix("WatchdogSec=")?.parse::<u32>().ok());
    assert!(watchdog >= Some(60), "a daemon that is slow is not taken for dead: {watchdog:?}");
    let threshold = format!("--threshold={EXPOSURE_MAX}");
    let arguments = ["security", "--offline=true", "--no-pager", &threshold];
    match Command::new("systemd-analyze").args(arguments).arg(packaged("tidepool.service")).output()
    {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{said} {}", String::from_utf8_lossy(&output.stderr));
            assert!(said.contains("Overall exposure level"), "{said}");
        }
        Err(error) => eprintln!("not looked at: systemd-analyze: {error}"),
    }
}

/// What stands in for the programs that would change the machine. The one for `apt-get` writes down
/// what a package's own scripts would see.
const STAND_INS: [(&str, &str); 4] = [
    ("dpkg-query", "exit 0"),
    ("cargo", "exit 0"),
    ("systemctl", "echo systemctl \"$@\" >>\"$TOLD\""),
    (
        "apt-get",
        "[ \"$1\" = install ] || exit 0\n\
         for service in tgt.service tgt ssh.service; do\n\
         status=0; [ ! -x /usr/sbin/policy-rc.d ] || /usr/sbin/policy-rc.d $service start || status=$?\n\
         echo $service $status $(readlink /run/systemd/system/$service) >>\"$TOLD\"; done\n\
         cat /etc/postgresql-common/createcluster.d/tidepool.conf >>\"$TOLD\"",
    ),
];

#[test]
fn what_the_tests_need_is_installed_without_a_service_of_it_and_leaves_no_setting() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!(
            "not looked at: only root has directories of its own in the place of the machine's"
        );
    }
    let directory = tempfile::tempdir().expect("a directory");
    for (name, text) in STAND_INS {
        let path = directory.path().join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("written");
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .expect("a mode");
    }
    let theirs =
        "printf '#!/bin/sh\\nexit 0\\n' >/usr/sbin/policy-rc.d; chmod 755 /usr/sbin/policy-rc.d";
    let systemd = "mkdir -p /run/systemd/system";
    for (before, told) in [
        ("true".into(), ["tgt.service 101", "tgt 101", "ssh.service 0"]),
        // What a killed one has left does no harm, and goes.
        (
            "printf '#!/bin/sh\\n# tidepool\\n' >/usr/sbin/policy-rc.d".into(),
            ["tgt.service 101", "tgt 101", "ssh.service 0"],
        ),
        (format!("{theirs}; {systemd}"), ["tgt.service 0 /dev/null", "tgt 0", "ssh.service 0"]),
    ] {
        let log = directory.path().join("told");
        let script = format!(
            "for hidden in /usr/sbin /etc /run /usr/lib/postgresql; do [ ! -d $hidden ] || mount -t tmpfs hidden $hidden; done
             {before}
             look() {{ find /usr/sbin /etc /run ! -type d -exec ls -l --time-style=+ {{}} +; }}
             look >\"$TOLD.before\"; scripts/deps.sh test; look >\"$TOLD.after\""
        );
        let path = format!("{}:/usr/bin:/bin", directory.path().display());
        let output = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "bash", "-euc", &script])
            .current_dir(packaged(".."))
            .env("PATH", path)
            .env("TOLD", &log)
            .output()
            .expect("unshare runs");
        assert!(output.status.success(), "{before}: {}", String::from_utf8_lossy(&output.stderr));
        let read =
            |end: &str| std::fs::read_to_string(format!("{}{end}", log.display())).expect("a file");
        let said = read("");
        for line in told
            .into_iter()
            .chain(["create_main_cluster = false", "systemctl --quiet disable tgt.service"])
        {
            assert!(said.lines().any(|found| found == line), "{before}: {line} is not in\n{said}");
        }
        match before.contains("# tidepool") {
            true => assert!(!read(".after").contains("policy-rc.d"), "it goes with the next one"),
            false => assert_eq!(read(".before"), read(".after"), "{before}"),
        }
        std::fs::remove_file(&log).expect("a file");
    }
}

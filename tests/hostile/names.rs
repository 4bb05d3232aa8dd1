//! Names that are more than names, in what managers of hosts call.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tidepool_testkit::{Scratch, need};

/// Names that the author of a guest's configuration may give its disks.
const NAMES: [&str; 13] = [
    "vm1 --fenced=h1",
    "--fenced=h1",
    "-f",
    "vm1;touch made",
    "$(touch made)",
    "`touch made`",
    "vm1\ttab",
    "*",
    "../../etc/passwd",
    "vm1\\n--fenced=h1",
    "näme",
    "&amp;",
    "a-name-that-is-longer-than-the-sixty-four-letters-that-a-name-may-have",
];

fn hooks() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/ha")
}

/// A host on which every command that a hook calls writes down its arguments, one on a line.
struct Host(Scratch);

impl Host {
    fn new() -> Host {
        let host = Host(Scratch::new("hostile").expect("a directory"));
        let calls = host.0.join("calls");
        for (program, more) in [("tidepool", "exit 1"), ("fenced", "exit 0"), ("qm", "cat \"$QM\"")]
        {
            let script = format!(
                "#!/bin/sh\nfor word in {program} \"$@\"; do printf '%s\\n' \"$word\"; done >>'{}'\n{more}\n",
                calls.display()
            );
            fs::write(host.0.join(program), script).expect("a program");
            fs::set_permissions(host.0.join(program), fs::Permissions::from_mode(0o755))
                .expect("a program");
        }
        host
    }

    /// Runs a hook; whether it has succeeded, and the words that its commands have got.
    fn run(&self, hook: &str, arguments: &[&str], input: &str) -> (bool, Vec<String>) {
        let _ = fs::remove_file(self.0.join("calls"));
        let (config, stdin) = (self.0.join("config"), self.0.join("stdin"));
        fs::write(&config, input).expect("a configuration");
        fs::write(&stdin, input).expect("an input");
        let path =
            format!("{}:{}", self.0.path().display(), std::env::var("PATH").expect("a path"));
        let output = Command::new(hooks().join(hook))
            .args(arguments)
            .env("PATH", path)
            .env("QM", &config)
            .env("TIDEPOOL_LIB", hooks())
            .env("TIDEPOOL_ETC", self.0.path())
            .current_dir(self.0.path())
            .stdin(fs::File::open(&stdin).expect("an input"))
            .stdout(Stdio::null())
            .output()
            .expect("it runs");
        let calls = fs::read_to_string(self.0.join("calls")).unwrap_or_default();
        (output.status.success(), calls.lines().map(str::to_owned).collect())
    }

    fn check(&self, hook: &str, name: &str, (done, words): (bool, Vec<String>)) {
        assert!(!done, "{hook} {name:?}: the guest must not start: {words:?}");
        let fences = words.iter().any(|word| word.starts_with("--fenced"));
        assert!(!fences, "{hook} {name:?}: a fence that nobody has confirmed: {words:?}");
        assert!(!self.0.join("made").exists(), "{hook} {name:?}: it was executed");
    }
}

#[test]
fn g6_a_hostile_name_of_a_disk_fences_nobody_and_runs_nothing() {
    let host = Host::new();
    for name in NAMES {
        let xml = format!(
            "<domain><devices><disk><source protocol='nbd' name='{name}'><host transport='unix' socket='/run/tidepool/nbd.sock'/></source></disk></devices></domain>"
        );
        let ran = host.run("libvirt-qemu", &["guest", "prepare", "begin", "-"], &xml);
        host.check("libvirt-qemu", name, ran);
        let ran = host.run("tidepool-failover", &["fenced", name], "");
        host.check("tidepool-failover", name, ran);
        // What an administrator has written down for a guest.
        fs::write(host.0.join("vms"), format!("guest {name}\n100 {name}\n")).expect("a list");
        for (hook, arguments) in [
            ("libvirt-qemu", &["guest", "prepare", "begin", "-"][..]),
            ("proxmox-hookscript", &["100", "pre-start"]),
        ] {
            let ran = host.run(hook, arguments, "");
            host.check(hook, name, ran);
        }
        fs::remove_file(host.0.join("vms")).expect("removed");
        // A name that is none is no export of ours; a part of it may be, and then only that is
        // asked for.
        let (_, words) = host.run(
            "proxmox-hookscript",
            &["100", "pre-start"],
            &format!("args: -drive export={name}\n"),
        );
        assert!(!words.iter().any(|word| word.starts_with("--fenced")), "{name:?}: {words:?}");
        assert!(!host.0.join("made").exists(), "{name:?}: it was executed");
    }
    // A good one is asked for.
    let (_, words) = host.run("tidepool-failover", &["fenced", "vm1"], "");
    assert!(words.windows(2).any(|pair| pair == ["--", "vm1"]), "{words:?}");
}

#[test]
fn shellcheck_finds_nothing_in_what_is_shipped() {
    need("shellcheck", "shellcheck").expect("installed");
    for hook in fs::read_dir(hooks()).expect("the hooks").flatten() {
        let text = fs::read_to_string(hook.path()).expect("a script");
        if text.starts_with("#!/bin/sh") {
            let output = Command::new("shellcheck").arg(hook.path()).output().expect("it runs");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        }
    }
}

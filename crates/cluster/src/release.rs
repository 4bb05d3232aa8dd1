//! Another release of Ceph than the machine's: the packages of another release of Debian, in a root
//! directory that the lab makes.
//!
//! A program that is started in the root finds that directory's `/usr` and `/etc` in the place of
//! the machine's. All other directories, devices, network and processes are the machine's. So the
//! lab itself is started in the root, and all of Ceph, fio, QEMU and the libraries that the lab
//! uses are of that release.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::ceph;
use crate::mounts;
use crate::process::{self, Process};

/// A release of Ceph that a release of Debian has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Release {
    /// The release of Ceph, such as 18.
    pub ceph: u32,
    /// The release of Debian, such as 13.
    pub debian: u32,
    /// The name of Debian's release.
    suite: &'static str,
}

/// The releases on which the lab has run.
const RELEASES: [Release; 2] = [
    Release { ceph: 16, debian: 12, suite: "bookworm" },
    Release { ceph: 18, debian: 13, suite: "trixie" },
];

/// Space in bytes for a root directory, including the packages that are downloaded for it.
pub const ROOT_BYTES: u64 = 2 << 30;

/// Debian packages with the programs that the lab starts.
const PACKAGES: [&str; 25] = [
    "bcache-tools",
    "ceph-common",
    "ceph-mgr",
    "ceph-mon",
    "ceph-osd",
    "dmsetup",
    "e2fsprogs",
    "fio",
    "fuse3",
    "iproute2",
    "kmod",
    "libnbd-bin",
    "librados2",
    "librbd1",
    "mount",
    "openssl",
    "procps",
    "qemu-block-extra",
    "qemu-system-common",
    "qemu-utils",
    "tgt",
    "tgt-rbd",
    "user-mode-linux",
    "util-linux",
    "xz-utils",
];

/// Directories that are the root's for programs in the root. With a merged `/usr` all other
/// directories with programs and libraries are links into `/usr`.
const OWN: [&str; 2] = ["/usr", "/etc"];
/// Links that exist with a merged `/usr`.
const MERGED: [&str; 3] = ["/bin", "/sbin", "/lib"];
/// The PATH of programs in the root.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";
/// The lab's own program in the root.
const PROGRAM: &str = "/usr/bin/tidepool";

/// Script that makes a root of Debian. It is run by `sh -c` with the suite, the directory and the
/// mirror as arguments. Its mounts and processes end with its first process.
const DEBOOTSTRAP: &str = r#"mount -t proc proc /proc; debootstrap --variant=minbase "$@""#;
/// Script that installs packages in the root. It is run by `sh -c` with the directory and the
/// packages' names as arguments. The packages' files need not be synced, because the root is thrown
/// away.
const INSTALL: &str = r#"root=$1; shift
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
in_root() { chroot "$root" "$@"; }
in_root apt-get update -qq
in_root apt-get install -y -qq --no-install-recommends -o Dpkg::Options::=--force-unsafe-io "$@"
in_root apt-get clean"#;

/// Why there is no root directory with another release.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// No release of Debian in the lab's list has that release of Ceph.
    #[error("no release of Debian that the lab knows has Ceph {0}; there are {known}", known = known())]
    Unknown(u32),
    /// This machine or this user cannot make the root directory.
    #[error("Ceph {ceph} is not installed here, and cannot be had meanwhile: {why}")]
    NotHere {
        /// The release that was asked for.
        ceph: u32,
        /// What is missing.
        why: String,
    },
    /// There is not enough space for the root directory.
    #[error(
        "no room for Ceph {ceph}: {place} has {free_mib} MiB free of the {needed_mib} MiB that its root directory needs; TMPDIR=DIR names another place",
        place = .place.display(), needed_mib = ROOT_BYTES >> 20
    )]
    NoRoom {
        /// The release that was asked for.
        ceph: u32,
        /// The directory in which the space was looked for.
        place: PathBuf,
        /// Free space there, in MiB.
        free_mib: u64,
    },
    /// A step failed.
    #[error("cannot {what}: {why}")]
    Failed {
        /// What was tried.
        what: String,
        /// The error.
        why: String,
    },
    /// The user has interrupted the installation.
    #[error("interrupted before Ceph {0} was there; nothing of it is left")]
    Interrupted(u32),
}

fn known() -> String {
    RELEASES.map(|release| release.ceph.to_string()).join(", ")
}

/// Turns an error into a [`ReleaseError`] that says what was tried.
fn failed<E: ToString>(what: impl Into<String>) -> impl FnOnce(E) -> ReleaseError {
    let what = what.into();
    move |error| ReleaseError::Failed { what, why: error.to_string() }
}

impl Release {
    /// Finds the release of Debian with that release of Ceph.
    ///
    /// # Errors
    /// There is none.
    pub fn find(ceph: u32) -> Result<Release, ReleaseError> {
        RELEASES.into_iter().find(|release| release.ceph == ceph).ok_or(ReleaseError::Unknown(ceph))
    }

    /// Checks whether a root with this release can be made below `parent`.
    ///
    /// # Errors
    /// The reason why not, in one line.
    pub fn probe(&self, parent: &Path) -> Result<(), ReleaseError> {
        let not = |why: String| ReleaseError::NotHere { ceph: self.ceph, why };
        if !rustix::process::geteuid().is_root() {
            let why = "it is installed into a root directory of its own, and only root can make one and mount it";
            return Err(not(why.into()));
        }
        if let Some(path) = MERGED
            .iter()
            .find(|path| !fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink()))
        {
            return Err(not(format!(
                "{path} is no link into /usr, so that another /usr does not take its place"
            )));
        }
        for (program, package) in
            [("debootstrap", "debootstrap"), ("unshare", "util-linux"), ("apt-get", "apt")]
        {
            process::need(program, package).map_err(not)?;
        }
        let at = parent.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"));
        let room = rustix::fs::statvfs(at).map_err(failed(format!("look at {}", at.display())))?;
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        if free < ROOT_BYTES {
            return Err(ReleaseError::NoRoom {
                ceph: self.ceph,
                place: at.into(),
                free_mib: free >> 20,
            });
        }
        Ok(())
    }

    /// Makes a root in `directory`, which must not exist yet, with all programs that the lab
    /// starts. When `stop` becomes true, the work ends early; the caller has to remove what is
    /// there then. The work takes some minutes, and needs root rights and the mirror of Debian that
    /// this machine's apt uses.
    ///
    /// # Errors
    /// When a step fails.
    pub fn make(&self, directory: &Path, stop: &AtomicBool) -> Result<Root, ReleaseError> {
        let root = Root { directory: directory.into() };
        let mirror = mirror()?;
        let what = format!("make a root directory of Debian {} from {mirror}", self.debian);
        let path = directory.to_str().ok_or("its name is not UTF-8");
        let path = path.map_err(failed(format!("use {}", directory.display())))?;
        self.step(&what, directory, DEBOOTSTRAP, &[self.suite, path, &mirror], stop)?;
        root.settle().map_err(failed(format!("write to {}", directory.display())))?;
        let what = format!("install Ceph {} and what the lab starts beside it", self.ceph);
        self.step(&what, directory, INSTALL, &[&[path], PACKAGES.as_slice()].concat(), stop)?;
        root.check(self)?;
        Ok(root)
    }

    /// Runs a script as the first process of namespaces of its own. The script is killed if this
    /// process ends. Its output is in a file beside the directory meanwhile.
    fn step(
        &self,
        what: &str,
        directory: &Path,
        script: &str,
        words: &[&str],
        stop: &AtomicBool,
    ) -> Result<(), ReleaseError> {
        let said = directory.with_extension("said");
        let log = File::create(&said).map_err(failed(what))?;
        let errors = log.try_clone().map_err(failed(what))?;
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "--propagation",
            "private",
            "--pid",
            "--fork",
            "--kill-child=KILL",
        ]);
        command.args(["sh", "-euc", script, "sh"]).args(words);
        set_environment(&mut command);
        command.env_remove("TMPDIR").env("DEBIAN_FRONTEND", "noninteractive");
        command.stdin(Stdio::null()).stdout(log).stderr(errors);
        let mut process = Process::spawn(command).map_err(failed(what))?;
        let interrupted = || stop.load(Ordering::Acquire).then(|| "interrupted".to_string());
        let ended = process.wait_unless(&interrupted).map_err(failed(what))?;
        let text = fs::read(&said).unwrap_or_default();
        let _ = fs::remove_file(&said);
        match ended {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(failed(what)(why(&String::from_utf8_lossy(&text), status))),
            Err(_) => Err(ReleaseError::Interrupted(self.ceph)),
        }
    }
}

/// Why a step failed, from its output: the last line with an error, or else the last line, or else
/// `status`.
fn why(text: &str, status: ExitStatus) -> String {
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    let error = lines().rfind(|line| line.starts_with("E:"));
    error.or(lines().next_back()).map_or_else(|| status.to_string(), String::from)
}

/// The mirror of Debian from which this machine gets its packages.
fn mirror() -> Result<String, ReleaseError> {
    let mut command = Command::new("apt-get");
    command.args(["indextargets", "--format", "$(ORIGIN) $(REPO_URI)", "Created-By: Packages"]);
    let output =
        command.stdin(Stdio::null()).output().map_err(failed("ask apt-get for its mirror"))?;
    mirror_in(&String::from_utf8_lossy(&output.stdout)).ok_or_else(|| {
        failed("find a mirror of Debian")(
            "there is none in this machine's apt sources (after apt-get update)",
        )
    })
}

/// The first mirror of Debian that is not one of security updates, from lines with an origin and an
/// address.
fn mirror_in(lines: &str) -> Option<String> {
    let mut found = lines.lines().filter_map(|line| line.strip_prefix("Debian "));
    found.find(|address| !address.contains("security")).map(String::from)
}

/// Sets the environment of a command in the root: no variable of the user must lead to programs or
/// languages that the root lacks.
fn set_environment(command: &mut Command) {
    command
        .env("PATH", PATH)
        .env("LC_ALL", "C.UTF-8")
        .env_remove("LD_LIBRARY_PATH")
        .env_remove("LD_PRELOAD");
}

/// A root directory with another release. Dropping this value does not remove the directory: it is
/// removed with the directory that it is in.
#[derive(Debug)]
pub struct Root {
    directory: PathBuf,
}

impl Root {
    /// Prepares the root for packages: it gets the machine's network settings and this program, and
    /// starts no services.
    fn settle(&self) -> io::Result<()> {
        fs::set_permissions(&self.directory, Permissions::from_mode(0o755))?;
        for file in ["etc/resolv.conf", "etc/hosts"] {
            let from = Path::new("/").join(file);
            if from.exists() {
                fs::copy(from, self.directory.join(file))?;
            }
        }
        let said = Command::new("apt-config").arg("dump").stdin(Stdio::null()).output()?.stdout;
        let said = String::from_utf8_lossy(&said).into_owned();
        fs::write(self.directory.join("etc/apt/apt.conf.d/99proxy"), proxies(&said))?;
        let policy = self.directory.join("usr/sbin/policy-rc.d");
        fs::write(&policy, "#!/bin/sh\nexit 101\n")?;
        fs::set_permissions(&policy, Permissions::from_mode(0o755))?;
        let program = self.directory.join(PROGRAM.trim_start_matches('/'));
        fs::copy("/proc/self/exe", &program)?;
        fs::set_permissions(&program, Permissions::from_mode(0o755))
    }

    /// Proves that programs in the root are of that release, and that the lab itself runs there.
    fn check(&self, release: &Release) -> Result<(), ReleaseError> {
        let told = self.told("ceph-osd")?;
        if ceph::release_in(&told) != Some(release.ceph) {
            return Err(
                failed(format!("have Ceph {} of Debian {}", release.ceph, release.debian))(
                    format!("it says: {told}"),
                ),
            );
        }
        self.told("tidepool").map(drop)
    }

    /// The version that a program in the root prints.
    fn told(&self, program: &str) -> Result<String, ReleaseError> {
        let what = format!("run {program} in the root directory");
        let mut command = Command::new(program);
        command.arg("--version").stdin(Stdio::null());
        self.enter(&mut command).map_err(failed(&what))?;
        let Output { status, stdout, stderr } = command.output().map_err(failed(&what))?;
        match status.success() {
            true => Ok(String::from_utf8_lossy(&stdout).trim().to_string()),
            // For example, the root's libc is older than that with which the program was compiled.
            false => Err(failed(&what)(why(&String::from_utf8_lossy(&stderr), status))),
        }
    }

    /// Makes a command start in the root. The mounts end with the command and all processes that it
    /// starts, however these end.
    ///
    /// # Errors
    /// The directory's name has a zero byte.
    pub fn enter(&self, command: &mut Command) -> io::Result<()> {
        set_environment(command);
        let own = OWN
            .map(|path| (self.directory.join(path.trim_start_matches('/')), PathBuf::from(path)));
        mounts::instead(command, &own)
    }

    /// A command that runs the lab in the root, without arguments.
    ///
    /// # Errors
    /// As [`Root::enter`].
    pub fn lab(&self) -> io::Result<Command> {
        let mut command = Command::new(PROGRAM);
        self.enter(&mut command)?;
        Ok(command)
    }
}

/// apt's settings for proxies, from all of apt's settings.
fn proxies(settings: &str) -> String {
    let is_one = |line: &&str| {
        line.to_ascii_lowercase().starts_with("acquire::")
            && line.to_ascii_lowercase().contains("proxy")
    };
    settings.lines().filter(is_one).map(|line| format!("{line}\n")).collect()
}

/// If a path leads into a directory that is the root's for programs in a root, returns that
/// directory.
pub fn hides(path: &Path) -> Option<&'static str> {
    let path = std::path::absolute(path).ok()?;
    let known = path.ancestors().find_map(|above| above.canonicalize().ok())?;
    OWN.into_iter().find(|own| known.starts_with(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_found_by_that_of_ceph() {
        assert_eq!(
            Release::find(18).map(|release| (release.debian, release.suite)).ok(),
            Some((13, "trixie"))
        );
        let error = Release::find(17).expect_err("no Debian has it").to_string();
        assert!(error.contains("Ceph 17") && error.contains("16, 18"), "{error}");
    }

    #[test]
    fn packages_come_from_where_the_machine_has_its_own() {
        let lines = "Other https://packages.example/debian/\nDebian http://mirror/debian-security/\n\
                     Debian http://mirror/debian/\nDebian http://other/debian/\n";
        assert_eq!(mirror_in(lines).as_deref(), Some("http://mirror/debian/"));
        assert_eq!(mirror_in("Ubuntu http://mirror/ubuntu/\n"), None);
        let settings = "APT::Architecture \"amd64\";\nAcquire::http::Proxy \"http://p:1\";\nAcquire::Retries \"3\";\nacquire::https::proxy::x \"DIRECT\";\n";
        assert_eq!(
            proxies(settings),
            "Acquire::http::Proxy \"http://p:1\";\nacquire::https::proxy::x \"DIRECT\";\n"
        );
    }

    #[test]
    fn a_step_that_fails_is_told_by_its_error() {
        let failure = std::os::unix::process::ExitStatusExt::from_raw(256);
        assert_eq!(
            why("I: Retrieving\nE: Failed getting release file\nI: end\n\n", failure),
            "E: Failed getting release file"
        );
        assert_eq!(why("one\n  two\n", failure), "two");
        assert_eq!(why("", failure), "exit status: 1");
    }

    #[test]
    fn what_lies_in_the_machines_own_directories_is_not_there_in_a_root() {
        assert_eq!(hides(Path::new("/usr/local/share/suite.toml")), Some("/usr"));
        assert_eq!(hides(Path::new("/lib/x")), Some("/usr"), "a link");
        assert_eq!(hides(Path::new("/etc")), Some("/etc"));
        assert_eq!(hides(Path::new("/var/tmp/nothing/x")), None);
    }

    #[test]
    fn what_runs_in_a_root_has_its_programs_and_settings_and_all_else_of_the_machine() {
        let scratch = crate::Scratch::new("release").expect("a directory");
        let root = Root { directory: scratch.join("root") };
        for own in OWN {
            fs::create_dir_all(root.directory.join(own.trim_start_matches('/')))
                .expect("a directory");
        }
        fs::write(root.directory.join("etc/told"), "in the root").expect("a file");
        fs::write(scratch.join("told"), "on the machine").expect("a file");
        if !rustix::process::geteuid().is_root() {
            return;
        }
        // busybox needs no library: the root has none.
        let busybox = "/bin/busybox";
        if !Path::new(busybox).exists() {
            return eprintln!("not looked at: busybox-static is not installed");
        }
        fs::create_dir(root.directory.join("usr/bin")).expect("a directory");
        fs::copy(busybox, root.directory.join("usr/bin/cat")).expect("a file");
        let mut command = Command::new("cat");
        command.arg("/etc/told").arg(scratch.join("told"));
        root.enter(&mut command).expect("plain paths");
        let output = command.output().expect("it runs");
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "in the rooton the machine",
            "{output:?}"
        );
        assert!(!Path::new("/etc/told").exists());
    }
}

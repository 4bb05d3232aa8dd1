//! What asks for a failover, as a manager of hosts calls it: the command, and the scripts in
//! `packaging/ha` with stand-ins for the programs of the managers.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use tidepool_testkit::{Error, Scratch, daemon};

use crate::document::repository;
use crate::pair::Host;

/// How a command has ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit status.
    pub status: i32,
    /// What it has printed.
    pub output: String,
    /// What it has said of what is wrong.
    pub error: String,
}

impl Ended {
    fn new(output: Output) -> Ended {
        Ended {
            status: output.status.code().unwrap_or(-1),
            output: String::from_utf8_lossy(&output.stdout).into_owned(),
            error: String::from_utf8_lossy(&output.stderr).trim_end().to_owned(),
        }
    }

    /// What became of each volume.
    ///
    /// # Panics
    /// When there is no report.
    pub fn volumes(&self) -> Vec<Value> {
        serde_json::from_str(&self.output).unwrap_or_else(|_| panic!("{self:?}"))
    }

    /// What became of the only volume.
    ///
    /// # Panics
    /// When the report is not of one volume.
    pub fn volume(&self) -> Value {
        let [volume] = &self.volumes()[..] else { panic!("{self:?}") };
        volume.clone()
    }
}

fn io(what: &str) -> impl Fn(std::io::Error) -> Error {
    let what = what.to_owned();
    move |source| Error::Io { what: what.clone(), source }
}

/// Starts `tidepool volume failover` on a host.
pub fn start_failover(host: &Host, arguments: &[&str]) -> Result<Child, Error> {
    let mut command = Command::new(daemon::tidepool()?);
    command.args(["volume", "failover", "--format", "json", "--admin"]).arg(host.admin.socket());
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().map_err(io("cannot start tidepool"))
}

/// How that has ended.
pub fn ended(child: Child) -> Result<Ended, Error> {
    child.wait_with_output().map(Ended::new).map_err(io("cannot wait for a program"))
}

/// Runs `tidepool volume failover` on a host.
pub fn fail_over(host: &Host, arguments: &[&str]) -> Result<Ended, Error> {
    ended(start_failover(host, arguments)?)
}

/// A host's side of a manager: its programs, which print what the test has written down, and what
/// is configured.
#[derive(Debug)]
pub struct Manager {
    scratch: Scratch,
}

impl Manager {
    /// Nothing but `tidepool` and the scripts is installed.
    pub fn new() -> Result<Manager, Error> {
        let scratch = Scratch::new("manager").map_err(io("cannot make a directory"))?;
        for directory in ["bin", "etc"] {
            fs::create_dir(scratch.join(directory)).map_err(io("cannot make a directory"))?;
        }
        let manager = Manager { scratch };
        symlink(repository().join("packaging/ha"), manager.scratch.join("lib"))
            .map_err(io("cannot link"))?;
        Ok(manager)
    }

    /// From now on the manager's program prints this.
    pub fn says(&self, program: &str, text: &str) -> Result<(), Error> {
        let said = self.scratch.join(format!("{program}.said"));
        fs::write(&said, text).map_err(io("cannot write"))?;
        self.installs(&format!("bin/{program}"), &format!("cat {}", said.display()))
    }

    /// A shell script under the manager's directory.
    pub fn installs(&self, path: &str, script: &str) -> Result<(), Error> {
        let path = self.scratch.join(path);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).map_err(io("cannot write"))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
            .map_err(io("cannot make executable"))
    }

    /// A file of the configuration.
    pub fn configures(&self, name: &str, text: &str) -> Result<(), Error> {
        fs::write(self.scratch.join("etc").join(name), text).map_err(io("cannot write"))
    }

    /// Runs a script of `packaging/ha` on a host with this on its standard input.
    pub fn runs(
        &self,
        host: &Host,
        script: &str,
        arguments: &[&str],
        input: &str,
    ) -> Result<Ended, Error> {
        let place = |of: &str| self.scratch.join(of);
        let socket = host.admin.socket();
        // The scripts name the daemon's default socket, unless they are told another.
        let real = daemon::tidepool()?.display();
        let with_socket = format!(
            "case \" $* \" in *' --admin '*) exec {real} \"$@\" ;; esac\n\
             area=$1 command=$2\nshift 2\nexec {real} \"$area\" \"$command\" --admin {} \"$@\"",
            socket.display()
        );
        self.installs("bin/tidepool", &with_socket)?;
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut paths = vec![place("bin")];
        paths.extend(std::env::split_paths(&path));
        let mut child = Command::new(place("lib").join(script))
            .args(arguments)
            .env("PATH", std::env::join_paths(paths).expect("no colon in it"))
            .env("TIDEPOOL_LIB", place("lib"))
            .env("TIDEPOOL_ETC", place("etc"))
            .env("TIDEPOOL_NBD", &host.socket)
            .env("OCF_RESKEY_volume", crate::rig::VOLUME)
            .env("OCF_RESKEY_admin", socket)
            .env("OCF_RESKEY_wait", "30s")
            .env("OCF_RESKEY_confirm", place("lib/fenced-pacemaker"))
            .env("OCF_RESKEY_failover", place("lib/tidepool-failover"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(io("cannot start a script"))?;
        let mut stdin = child.stdin.take().expect("it is piped");
        // A script that needs no input may be gone by now.
        let _ = stdin.write_all(input.as_bytes());
        drop(stdin);
        ended(child)
    }
}

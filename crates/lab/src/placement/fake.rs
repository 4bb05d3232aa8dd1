//! A substitute for the program `tidepool`, for tests of an operator's actions. Its daemons report
//! what a test has set, and its commands are logged.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::client::NAMES;
use super::{Ground, Host, SsdShare};
use tidepool_cluster::Scratch;

/// `serve` runs until SIGTERM; `status` prints the file that is named after the daemon.
const PROGRAM: &str = r#"#!/bin/sh
here=$(dirname "$0")
for word in "$@"; do
    case "$word" in --admin=*) name=$(basename "${word#--admin=}" .admin) ;; esac
done
case "$1 $2" in
"serve "*)
    trap 'echo "stop $name" >> "$here/asked"; exit 0' TERM
    echo ready
    while :; do sleep 0.05; done ;;
"status "*) cat "$here/$name.status" ;;
"volume takeover")
    echo "takeover $3 on $name" >> "$here/asked"
    if [ -e "$here/refusal" ]; then cat "$here/refusal" >&2; exit 1; fi
    echo "{}" ;;
"volume drain") echo "drain $name" >> "$here/asked" ;;
"recover "*) echo "recover $2 $3" >> "$here/asked" ;;
*) echo "what is $*?" >&2; exit 2 ;;
esac
"#;

/// The program, in a directory with the files that it reads and the log of its commands.
#[derive(Debug)]
pub(super) struct Fake(Scratch);

impl Fake {
    pub(super) fn new() -> Fake {
        let fake = Fake(Scratch::new("fake-tidepool").expect("a directory"));
        fs::write(fake.program(), PROGRAM).expect("a file");
        fs::set_permissions(fake.program(), fs::Permissions::from_mode(0o755)).expect("it is ours");
        fake
    }

    fn program(&self) -> PathBuf {
        self.0.join("tidepool")
    }

    /// A cluster with two hypervisors; the clients of each hypervisor have one image.
    pub(super) fn ground(&self) -> Ground {
        let ssd = || SsdShare { directory: self.0.path().into(), bytes: 1 << 20 };
        Ground {
            replicas: 1,
            program: self.program(),
            directory: self.0.path().into(),
            slots: Vec::new(),
            stores: Vec::new(),
            ceph_conf: Vec::new(),
            network: None,
            guests: BTreeMap::new(),
            server_ssds: Vec::new(),
            hosts: (0..2).map(|_| Host { ssd: Some(ssd()), node: None }).collect(),
            hypervisors: 2,
            client_conf: "ceph.conf".into(),
            images: vec!["img0".into(), "img1".into()],
            gateway: None,
            uris: BTreeMap::new(),
        }
    }

    /// Sets the status of the one volume that a hypervisor's daemon reports from now on.
    pub(super) fn says(&self, host: usize, state: &str, dirty_bytes: u64) {
        let volume =
            json!({ "name": format!("img{host}"), "state": state, "dirty_bytes": dirty_bytes });
        self.says_of_all(host, &[volume]);
    }

    /// Sets the status of all volumes that a hypervisor's daemon reports from now on.
    pub(super) fn says_of_all(&self, host: usize, volumes: &[Value]) {
        let status = json!({ "volumes": volumes }).to_string();
        fs::write(self.0.join(format!("{}.status", NAMES[host])), status).expect("a file");
    }

    /// Makes each takeover fail with this message from now on.
    pub(super) fn refuses(&self, why: &str) {
        fs::write(self.0.join("refusal"), format!("tidepool: {why}\n")).expect("a file");
    }

    /// The logged commands, in their order.
    pub(super) fn asked(&self) -> Vec<String> {
        let asked = fs::read_to_string(self.0.join("asked")).unwrap_or_default();
        asked.lines().map(String::from).collect()
    }
}

//! The demo, as its user lives it.

use crate::common::tidepool;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;

/// All that a demo has in its directory.
fn files(parent: &Path) -> Vec<String> {
    let Ok(users) = fs::read_dir(parent) else { return Vec::new() };
    let directories = users.flatten().filter_map(|user| fs::read_dir(user.path()).ok());
    let entries = directories.flat_map(|entries| entries.flatten());
    let inside = entries.flat_map(|entry| match fs::read_dir(entry.path()) {
        Ok(files) => files.flatten().map(|file| file.path().display().to_string()).collect(),
        Err(_) => vec![entry.path().display().to_string()],
    });
    inside.collect()
}

#[test]
fn an_interrupted_demo_leaves_nothing_behind() {
    // While it fills the image, and while its daemon runs.
    for (name, signal) in
        [("hdd.img", Signal::INT), ("hdd.cache", Signal::INT), ("hdd.sock", Signal::TERM)]
    {
        let parent = tempfile::tempdir().expect("a directory");
        let mut demo = tidepool()
            .args(["demo", "--seconds", "5"])
            .env("TMPDIR", parent.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        while !files(parent.path()).iter().any(|file| file.ends_with(name)) {
            assert!(demo.try_wait().expect("a status").is_none(), "it ended before {name}");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        kill_process(Pid::from_child(&demo), signal).expect("it runs");
        assert_eq!(demo.wait().expect("it ends").code(), Some(1));
        let (mut out, mut errors) = (String::new(), String::new());
        demo.stdout.take().expect("a pipe").read_to_string(&mut out).expect("text");
        demo.stderr.take().expect("a pipe").read_to_string(&mut errors).expect("text");
        assert_eq!((out.as_str(), errors.as_str()), ("", "tidepool: interrupted\n"), "{name}");
        assert_eq!(files(parent.path()), Vec::<String>::new(), "{name}");
    }
}

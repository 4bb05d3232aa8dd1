//! A daemon that serves the volume of a [`Place`], and what is asked of it.

use super::{Daemon, Place, run};
use serde_json::Value;
use std::fs;
use tidepool_nbd::client::BlockingClient;

/// A client of the place's front door.
pub fn client(place: &Place, volume: &str) -> BlockingClient {
    client_at(place, "nbd.sock", volume)
}

/// A client of one of the place's sockets.
pub fn client_at(place: &Place, socket: &str, volume: &str) -> BlockingClient {
    let uri = format!("nbd+unix:///{volume}?socket={}", place.text(socket));
    BlockingClient::connect(&uri.parse().expect("a URI")).expect("a connection")
}

/// Runs a command on the place's daemon and returns its JSON.
pub fn json(place: &Place, args: &[&str]) -> Value {
    let more = ["--format", "json", "--admin", &place.text("admin.sock")];
    let ended = run(args.iter().copied().chain(more));
    serde_json::from_str(ended.done()).expect("JSON")
}

/// A daemon with a new cache and the place's image.
pub fn start(place: &Place, more: &[&str]) -> Daemon {
    let mut args = place.serve_args();
    args.extend(more.iter().map(|arg| (*arg).to_owned()));
    Daemon::start(args, &place.path("log"))
}

/// The options of [`Place::serve_args`] that a restart needs: no volumes, no size.
pub fn restart_args(place: &Place) -> Vec<String> {
    let door = format!("nbd+unix:///?socket={}", place.text("nbd.sock"));
    ["serve", "--cache", &place.text("cache"), "--nbd", &door, "--admin", &place.text("admin.sock")]
        .map(String::from)
        .into()
}

/// The daemon again, with what its cache knows.
pub fn restart(place: &Place) -> Daemon {
    Daemon::start(restart_args(place), &place.path("log"))
}

/// The options of [`Place::serve_args`] with the volume on another image.
pub fn args_on(place: &Place, image: &str) -> Vec<String> {
    let mut args = place.serve_args();
    let at = args.iter().position(|arg| arg == "--volume").expect("an option");
    args[at + 1] = format!("vm1=file:{image}");
    args
}

/// A daemon whose image takes and gives nothing while a file `gate` is there, as it is now.
pub fn start_gated(place: &Place) -> Daemon {
    fs::write(place.path("gate"), b"").expect("a gate");
    let mut args = args_on(place, &format!("{}?gate={}", place.text("image"), place.text("gate")));
    args.extend(["--accept-loss".to_owned(), "5s".to_owned()]);
    Daemon::start(args, &place.path("log"))
}

/// The status of one volume.
pub fn volume_of(place: &Place, name: &str) -> Value {
    let status = json(place, &["status"]);
    let volumes = status["volumes"].as_array().expect("a list").iter();
    volumes
        .clone()
        .find(|volume| volume["name"] == name)
        .unwrap_or_else(|| panic!("{name}: {status}"))
        .clone()
}

/// The status of one volume, once the volume is in this state.
pub fn wait_for_state(place: &Place, name: &str, state: &str) -> Value {
    loop {
        let volume = volume_of(place, name);
        if volume["state"] == state {
            return volume;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

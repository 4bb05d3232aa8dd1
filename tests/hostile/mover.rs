//! A host that offers its volume to another one, and puts a link to a file of that host in the
//! place of the image before it lets go.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

use tidepool_replica::wire::Message;
use tidepool_testkit::nbd::Client;
use tidepool_testkit::{Scratch, one_at_a_time};
use tidepool_tests::rig::MIB;
use tidepool_tests::trio::Trio;

use crate::intruder::Intruder;
use crate::peers::{Facts, OWNER, THIRD, beginnings};

/// The volume that is offered.
const THEIRS: &str = "theirs";
/// Longest wait of the guest that came along.
const GUEST_MAX: Duration = Duration::from_secs(30);

#[test]
fn g6_an_image_that_is_another_file_by_now_is_not_opened() {
    let _turn = one_at_a_time();
    let mut trio = Trio::on_file().expect("three hosts");
    trio.add(THIRD, THEIRS, 32 * MIB).expect("in sync");
    let image = trio.scratch.join(THEIRS);
    let facts = Facts::about(&trio, THIRD, THEIRS);
    trio.hosts[THIRD].daemon.kill().expect("killed");
    // No other host may name what is there.
    let elsewhere = Scratch::new("elsewhere").expect("a directory");
    let (victim, content) = (elsewhere.join("victim"), vec![b'S'; 32 * MIB as usize]);
    fs::write(&victim, &content).expect("written");

    let mut intruder = Intruder::connect(&trio, THIRD, OWNER, THIRD);
    let [.., offer] = beginnings(facts.call_it("h2", THEIRS, &facts.image), "h0");
    intruder.send(&offer).expect("sent");
    let expects = intruder.receive(|message| matches!(message, Message::Expecting { .. }));
    assert!(expects.expect("an answer"), "its own volume may come");
    fs::rename(&image, trio.scratch.join("away")).expect("renamed");
    symlink(&victim, &image).expect("a link");

    let socket = trio.hosts[OWNER].socket.clone();
    let guest = std::thread::spawn(move || {
        let mut client = Client::connect(&socket, THEIRS)?;
        client.give_up_after(GUEST_MAX)?;
        client.write(0, &[b'P'; 4096])
    });
    let refusal = loop {
        enum Said {
            Beat,
            Take,
            Ask,
            End(String),
        }
        let said = intruder.receive(|message| match message {
            Message::Beat { .. } => Said::Beat,
            Message::Take => Said::Take,
            Message::Ask { .. } => Said::Ask,
            Message::Refused(why) => Said::End((*why).to_owned()),
            other => Said::End(format!("{other:?}")),
        });
        let answer = match said.expect("a message") {
            Said::Beat => Message::Beat { time_ns: 0 },
            Said::Take => Message::LetGo { generation: facts.generation, clean: true },
            Said::Ask => Message::Told { done: false, crc: 0, data_bytes: 0 },
            Said::End(why) => break why,
        };
        intruder.send(&answer).expect("sent");
    };
    assert!(refusal.contains("its image is not the one any more that was offered"), "{refusal}");
    assert!(guest.join().expect("no panic").is_err(), "the guest has no disk");
    assert!(fs::read(&victim).expect("read") == content, "the file is as it was");
    assert_eq!(
        fs::read_dir(elsewhere.path()).expect("files").count(),
        1,
        "and nothing stands beside it"
    );
}

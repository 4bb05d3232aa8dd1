//! Who is let in, who has to go for that, and who waits for a volume that is on its way.

use super::MIB;
use crate::door::{Door, memory, spec};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use tidepool_daemon::shard::limits::{
    CONNECTIONS_OF_VOLUME_MAX, CONNECTIONS_RESERVED, HANDSHAKES_MAX,
};
use tidepool_nbd::client::{BlockingClient, ClientError, Wanted};
use tidepool_nbd::wire;

fn greeted(mut stream: UnixStream) -> bool {
    stream.read(&mut [0; 18]).is_ok_and(|bytes| bytes > 0)
}

#[test]
fn a_connection_too_many_is_turned_away_and_a_place_that_becomes_free_is_used() {
    let door = Door::open(MIB as u64, memory());
    let mut all: Vec<UnixStream> = (0..HANDSHAKES_MAX).map(|_| door.dial()).collect();
    for stream in &mut all {
        stream.read_exact(&mut [0; 18]).expect("a greeting");
    }
    assert!(!greeted(door.dial()));
    assert_eq!(door.status().reactor.turned_away, 1);
    all.pop();
    door.wait_until("a place is free", |_| greeted(door.dial()));
}

#[test]
fn clients_that_do_not_end_their_handshake_keep_nobody_out() {
    let door = Door::open(MIB as u64, memory());
    let mut idle: Vec<UnixStream> = (0..HANDSHAKES_MAX).map(|_| door.dial()).collect();
    for stream in &mut idle {
        stream.read_exact(&mut [0; 18]).expect("a greeting");
    }
    // Long before the limit of a handshake.
    std::thread::sleep(Duration::from_millis(1100));
    let mut others: Vec<_> = (0..3).map(|_| door.client()).collect();
    others.iter_mut().for_each(|client| client.write(0, &[7; 512]).expect("served"));
    assert_eq!(idle[0].read(&mut [0]).expect("the end"), 0, "the oldest has given its place");
}

#[test]
fn clients_of_a_volumes_own_socket_that_do_not_end_their_handshake_keep_no_other_one_out() {
    let door = Door::open(MIB as u64, memory());
    let own = door.own_socket("v");
    let connect = || UnixStream::connect(&own).expect("the shard listens");
    let mut served = BlockingClient::over(connect(), Wanted::new("")).expect("a handshake");
    let mut idle: Vec<UnixStream> = (1..CONNECTIONS_OF_VOLUME_MAX).map(|_| connect()).collect();
    for stream in &mut idle {
        stream.read_exact(&mut [0; 18]).expect("a greeting");
    }
    std::thread::sleep(Duration::from_millis(1100));
    let mut other = BlockingClient::over(connect(), Wanted::new("")).expect("a handshake");
    other.write(0, &[7; 512]).expect("served");
    assert_eq!(idle[0].read(&mut [0]).expect("the end"), 0, "the oldest has given its place");
    served.write(512, &[7; 512]).expect("one that has ended its handshake keeps its place");
}

#[test]
fn the_clients_of_one_volume_take_nothing_from_another() {
    let door = Door::open(MIB as u64, memory());
    door.add(spec("w", MIB as u64));
    let (own, neighbour) = (door.own_socket("v"), door.own_socket("w"));
    let mut greedy = Vec::new();
    let mut full = |socket: &std::path::Path, export: &str| {
        let connect = || {
            let stream = UnixStream::connect(socket).expect("the shard listens");
            BlockingClient::over(stream, Wanted::new(export))
        };
        let before = greedy.len();
        greedy.extend(std::iter::from_fn(|| connect().ok()));
        greedy.len() - before
    };
    assert_eq!(full(&own, ""), CONNECTIONS_OF_VOLUME_MAX);
    assert_eq!(full(&door.socket(), "v"), CONNECTIONS_OF_VOLUME_MAX);
    // A user who may open the socket for all takes nothing from a volume's own.
    assert_eq!(full(&door.socket(), "w"), CONNECTIONS_OF_VOLUME_MAX);
    assert!(full(&neighbour, "") >= CONNECTIONS_RESERVED);
    assert_eq!(door.status().reactor.turned_away, 4);
    drop(greedy);
    door.wait_empty();
    assert_eq!(door.client().size_bytes(), MIB as u64, "all places are free again");
}

/// The names that a socket lists.
fn listed(socket: &std::path::Path) -> Vec<String> {
    let mut stream = UnixStream::connect(socket).expect("the shard listens");
    stream.read_exact(&mut [0; 18]).expect("a greeting");
    let mut list = 3u32.to_be_bytes().to_vec();
    list.extend(wire::MAGIC_OPTION.to_be_bytes());
    list.extend(wire::OPT_LIST.to_be_bytes());
    list.extend(0u32.to_be_bytes());
    stream.write_all(&list).expect("sent");
    let mut names = Vec::new();
    loop {
        let mut head = [0; 20];
        stream.read_exact(&mut head).expect("an answer");
        let number =
            |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("four bytes"));
        let mut body = vec![0; number(16) as usize];
        stream.read_exact(&mut body).expect("an answer");
        match number(12) {
            wire::REP_SERVER => names.push(String::from_utf8_lossy(&body[4..]).into_owned()),
            kind => {
                assert_eq!(kind, wire::REP_ACK);
                return names;
            }
        }
    }
}

#[test]
fn a_volumes_own_socket_knows_of_no_other_volume() {
    let door = Door::open(MIB as u64, memory());
    door.add(spec("w", 2 * MIB as u64));
    let own = door.own_socket("w");
    let connect = |export: &str| {
        BlockingClient::over(UnixStream::connect(&own).expect("it listens"), Wanted::new(export))
            .map(|client| client.size_bytes())
    };
    assert_eq!(listed(&door.socket()), ["v", "w"]);
    assert_eq!(listed(&own), ["w"]);
    for export in ["", "w"] {
        assert_eq!(connect(export).expect("its volume"), 2 * MIB as u64);
    }
    for export in ["v", "x"] {
        let error = connect(export).expect_err("not its volume");
        assert!(error.to_string().contains("there is no export"), "{error}");
    }
    // Also one that another volume's client would wait for.
    let _coming = door.shard.announce("x").expect("it runs");
    assert!(connect("x").is_err());
    assert_eq!(listed(&own), ["w"]);
}

/// A client that dials and tells in the end whether it was let in, and how large the volume is.
fn waiting_client(door: &Door, export: &str) -> std::thread::JoinHandle<Result<u64, ClientError>> {
    let (stream, wanted) = (door.dial(), Wanted::new(export));
    std::thread::spawn(move || {
        BlockingClient::over(stream, wanted).map(|client| client.size_bytes())
    })
}

#[test]
fn a_client_waits_for_a_volume_that_is_on_its_way() {
    let door = Door::open(MIB as u64, memory());
    let announced = door.shard.announce("w").expect("it runs");
    let clients = [waiting_client(&door, "w"), waiting_client(&door, "w")];
    door.wait_until("they ask", |status| status.reactor.accepted == 2);
    // Others are served meanwhile.
    assert_eq!(door.client().size_bytes(), MIB as u64);
    assert!(clients.iter().all(|client| !client.is_finished()));
    door.add(spec("w", 2 * MIB as u64));
    for client in clients {
        assert_eq!(client.join().expect("no panic").expect("it is let in"), 2 * MIB as u64);
    }
    drop(announced);
    assert_eq!(door.client_with(Wanted::new("w")).size_bytes(), 2 * MIB as u64);
}

#[test]
fn a_client_that_leaves_while_it_waits_gives_its_place_back() {
    let door = Door::open(MIB as u64, memory());
    let announced = door.shard.announce("w").expect("it runs");
    let stays = waiting_client(&door, "w");
    let mut go = 3u32.to_be_bytes().to_vec();
    go.extend(wire::MAGIC_OPTION.to_be_bytes());
    go.extend(wire::OPT_GO.to_be_bytes());
    go.extend(7u32.to_be_bytes());
    go.extend([0, 0, 0, 1, b'w', 0, 0]);
    let ask = || {
        let mut stream = door.dial();
        stream.read_exact(&mut [0; 18]).expect("a greeting");
        stream.write_all(&go).expect("sent");
        stream
    };
    let waits = |mut stream: &UnixStream| {
        stream.set_read_timeout(Some(Duration::from_millis(100))).expect("a limit");
        stream.read(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    };
    door.wait_until("it asks", |status| status.reactor.accepted == 1);
    assert!(waits(&ask()));
    let leave: Vec<UnixStream> = (1..CONNECTIONS_OF_VOLUME_MAX).map(|_| ask()).collect();
    door.wait_until("all places are taken", |_| !waits(&ask()));
    drop(leave);
    // Those who are turned away are told so at once.
    door.wait_until("a place is free", |_| waits(&ask()));
    assert!(!stays.is_finished(), "the others had not waited long enough to be refused");
    drop(announced);
    stays.join().expect("no panic").expect_err("the volume does not come");
}

#[test]
fn nobody_waits_for_a_volume_that_does_not_come() {
    let door = Door::open(MIB as u64, memory());
    let refused = |client: std::thread::JoinHandle<Result<u64, ClientError>>| {
        let error = client.join().expect("no panic").expect_err("it does not come");
        assert!(error.to_string().contains("there is no export"), "{error}");
    };
    let announced = door.shard.announce("w").expect("it runs");
    let client = waiting_client(&door, "w");
    door.wait_until("it asks", |status| status.reactor.accepted == 1);
    announced.set_awaited(false).expect("it runs");
    refused(client);
    refused(waiting_client(&door, "w"));
    announced.set_awaited(true).expect("it runs");
    let client = waiting_client(&door, "w");
    door.wait_until("it asks", |status| status.reactor.accepted == 3);
    drop(announced);
    refused(client);
    refused(waiting_client(&door, "w"));
}

#[test]
fn the_only_volume_that_is_open_is_no_default_while_another_is_on_its_way() {
    let door = Door::open(MIB as u64, memory());
    assert_eq!(door.client_with(Wanted::new("")).size_bytes(), MIB as u64);
    let announced = door.shard.announce("w").expect("it runs");
    for awaited in [true, false] {
        announced.set_awaited(awaited).expect("it runs");
        let error =
            waiting_client(&door, "").join().expect("no panic").expect_err("there is a choice");
        assert!(error.to_string().contains("there is no export"), "{error}");
    }
    drop(announced);
    assert_eq!(door.client_with(Wanted::new("")).size_bytes(), MIB as u64);
}

use super::*;
use crate::events::course::window;
use crate::events::ledger::compare;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};

/// How a server of an export handles a request.
#[derive(Clone, Copy, PartialEq)]
enum Mood {
    Serve,
    Fail,
    /// Gives no answer.
    Sulk,
    /// Answers that it has written, without writing.
    Lie,
}

/// A server of one export, its content and its behaviour.
struct Server {
    image: Arc<Mutex<Vec<u8>>>,
    mood: Arc<Mutex<Mood>>,
}

fn serve(listener: UnixListener, server: &Server) {
    let (image, mood) = (server.image.clone(), server.mood.clone());
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (image, mood) = (image.clone(), mood.clone());
            std::thread::spawn(move || answer(stream, &image, &mood));
        }
    });
}

/// Greets, and answers until the connection ends.
fn answer(mut stream: UnixStream, image: &Mutex<Vec<u8>>, mood: &Mutex<Mood>) -> Option<()> {
    let mut greeting = [&b"NBDMAGICIHAVEOPT"[..], &[0, 3]].concat();
    let option = |kind: u32, body: &[u8]| {
        [
            &0x0003_e889_0455_65a9_u64.to_be_bytes()[..],
            &7u32.to_be_bytes(),
            &kind.to_be_bytes(),
            &(body.len() as u32).to_be_bytes(),
            body,
        ]
        .concat()
    };
    stream.write_all(&greeting).ok()?;
    // Flags, the option and the length of its data; then the data.
    let mut head = [0; 20];
    stream.read_exact(&mut head).ok()?;
    let mut rest = vec![0; u32::from_be_bytes(head[16..].try_into().ok()?) as usize];
    stream.read_exact(&mut rest).ok()?;
    greeting = option(3, &[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 5]);
    greeting.extend(option(1, &[]));
    stream.write_all(&greeting).ok()?;
    loop {
        let mut head = [0; 28];
        stream.read_exact(&mut head).ok()?;
        let kind = u16::from_be_bytes(head[6..8].try_into().ok()?);
        let offset = u64::from_be_bytes(head[16..24].try_into().ok()?) as usize;
        let len = u32::from_be_bytes(head[24..].try_into().ok()?) as usize;
        let mut data = vec![0; if kind == WRITE { len } else { 0 }];
        stream.read_exact(&mut data).ok()?;
        let now = *mood.lock().ok()?;
        if now == Mood::Sulk {
            continue;
        }
        let mut reply = 0x6744_6698_u32.to_be_bytes().to_vec();
        let errno: u32 = if now == Mood::Fail { 5 } else { 0 };
        reply.extend(errno.to_be_bytes());
        reply.extend(&head[8..16]);
        let mut image = image.lock().ok()?;
        match kind {
            WRITE if now == Mood::Serve => image[offset..offset + len].copy_from_slice(&data),
            READ if now != Mood::Fail => reply.extend(&image[offset..offset + len]),
            _ => {}
        }
        drop(image);
        stream.write_all(&reply).ok()?;
    }
}

const SET_BYTES: u64 = 64 << 10;

/// What a client of the server gets in two seconds. The server changes its behaviour to `mood`
/// after the first second.
fn seen(mood: Mood, read_percent: u8) -> (Vec<Client>, Vec<u8>) {
    let scratch = tidepool_cluster::Scratch::new("event-client").expect("a directory");
    let socket = scratch.join("nbd");
    let server = Server {
        image: Arc::new(Mutex::new(vec![0xee; SET_BYTES as usize])),
        mood: Arc::new(Mutex::new(Mood::Serve)),
    };
    serve(UnixListener::bind(&socket).expect("a socket"), &server);
    let load = Load {
        seed: 9,
        exports: vec![(socket, "img0".into())],
        depth: 4,
        block_bytes: 4096,
        set_bytes: SET_BYTES,
        read_percent,
        requests_per_s: 100,
        begin: Instant::now(),
        seconds: 2.0,
    };
    let ((), clients) = run(&load, || {
        std::thread::sleep(Duration::from_secs(1));
        *server.mood.lock().expect("no panic") = mood;
        std::thread::sleep(Duration::from_millis(1_200));
    });
    let image = server.image.lock().expect("no panic").clone();
    (clients, image)
}

#[test]
fn each_request_is_accounted_for_and_what_was_acknowledged_is_there() {
    let (clients, image) = seen(Mood::Serve, 50);
    let all = window(&clients, (0.0, 2.0), 1.0);
    assert_eq!((all.due, all.failed, all.unanswered), (200, 0, 0));
    assert!(all.p99_us.is_some() && all.longest_us.is_some_and(|us| us < 1e6), "{all:?}");
    let regions = &clients[0].regions;
    let kept = compare(regions, &mut &image[..]).expect("all of it");
    assert!(kept.blocks > 8 && kept.lost == 0, "{kept:?}");
    let writes: u64 = regions.iter().map(Region::writes).sum();
    assert!((60..140).contains(&writes), "about half of 200: {writes}");
    assert!(regions.iter().all(|region| region.wrong_reads() == 0));
}

#[test]
fn errors_and_requests_without_an_answer_are_told_as_what_they_are() {
    let (clients, image) = seen(Mood::Fail, 0);
    let after = window(&clients, (1.1, 2.0), 1.0);
    assert_eq!((after.failed, after.unanswered), (after.due, 0));
    assert_eq!(compare(&clients[0].regions, &mut &image[..]).expect("all of it").lost, 0);
    let (clients, image) = seen(Mood::Sulk, 0);
    let after = window(&clients, (1.1, 2.0), 1.0);
    assert_eq!((after.failed, after.unanswered, after.p50_us), (0, after.due, None));
    assert!(after.due >= 80, "those that wait for a place count as well: {}", after.due);
    assert_eq!(compare(&clients[0].regions, &mut &image[..]).expect("all of it").lost, 0);
}

#[test]
fn a_server_that_acknowledges_what_it_does_not_keep_is_found_out() {
    let (clients, image) = seen(Mood::Lie, 20);
    let regions = &clients[0].regions;
    let kept = compare(regions, &mut &image[..]).expect("all of it");
    assert!(kept.lost > 4, "{kept:?}");
    assert!(kept.lost_from_to_s.is_some_and(|(from, to)| from > 0.9 && to > from), "{kept:?}");
    assert!(
        regions.iter().map(Region::wrong_reads).sum::<u64>() > 0,
        "its clients have read something older"
    );
}

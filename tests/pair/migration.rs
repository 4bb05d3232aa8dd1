//! A guest moves to another host with its volume.

use super::*;
use tidepool_testkit::nbd::Client;

#[test]
fn g1_a_guest_that_moves_reads_and_writes_what_it_had_written_where_it_was() {
    let _turn = one_at_a_time();
    let mut pair = pair();
    let mut workload = workload(&pair, 620);
    for round in 0..ROUNDS {
        let offered = pair.offer().expect("clients are let in over there");
        assert_eq!(offered["live"], true, "{offered}");
        // The guest runs where it was; there is somebody over there already, who looks at the disk.
        let mut arrived = Client::connect(&pair.peer().socket, VOLUME).expect("it is let in");
        under_load(&mut workload, 300, || {
            arrived.read(0, 512).expect("what is read is read over there");
        });
        let stays = Client::connect(&pair.owner().socket, VOLUME).expect("the guest's old process");
        workload.disconnect().expect("goodbye");
        pair.owner = 1 - pair.owner;
        pair.verify(&mut workload).expect("everything is read over there");
        arrived.flush().expect("nobody has written");
        assert_eq!(pair.peer().volume().expect("a status").expect("it is here")["state"], "serving");
        let since = Instant::now();
        workload.run(1).expect("a write");
        println!("round {round}: a write that has the volume come took {} ms", since.elapsed().as_millis());
        workload.run(300).expect("a run");
        arrived.read(0, 4096).expect("it is a client like any other");
        drop(stays);
        workload.verify().expect("nothing is lost");
        pair.owner().wait_sync().expect("the other way round");
    }
    workload.disconnect().expect("goodbye");
}

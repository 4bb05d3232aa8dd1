//! A host dies between any two steps of a handoff, of a takeover, or of the loss of a peer.

use super::{pair, workload};

use tidepool_testkit::one_at_a_time;
use tidepool_testkit::rng::{self, Rng};
use tidepool_tests::killed::{Midst, round};

/// Rounds of the short form; `make pair` has as many as are wanted.
const ROUNDS: u64 = 4;

fn rounds(midst: Midst, seed: u64) {
    let _turn = one_at_a_time();
    let mut pair = pair();
    let mut workload = workload(&pair, seed);
    let mut rng = Rng::new(rng::seed(seed + 1));
    for at in 1..=ROUNDS {
        let told = round(&mut pair, &mut workload, &mut rng, midst)
            .expect("one of them serves everything");
        println!("round {at}: {told}");
    }
    workload.disconnect().expect("goodbye");
}

#[test]
fn g4_a_host_that_dies_while_a_volume_is_handed_over_takes_nothing_with_it() {
    rounds(Midst::Handoff, 660);
}

#[test]
fn g4_a_peer_that_dies_while_it_takes_over_takes_nothing_with_it() {
    rounds(Midst::Takeover, 662);
}

#[test]
fn g4_an_owner_that_dies_while_it_parts_with_a_dead_peer_takes_nothing_with_it() {
    rounds(Midst::Loss, 664);
}

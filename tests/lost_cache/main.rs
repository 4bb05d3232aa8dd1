//! The cache is destroyed under load: the image, without it, is one exact state of the volume. `make lost` does this for long.

use tidepool_testkit::{Cluster, ClusterOptions, one_at_a_time, rng};
use tidepool_tests::lost::round;

#[test]
fn g5_a_destroyed_cache_leaves_a_file_as_it_once_was() {
    let _turn = one_at_a_time();
    for seed in 0..3 {
        println!(
            "{:?}",
            round(None, rng::seed(500 + seed)).expect("an exact state, and a loss that is bounded")
        );
    }
}

#[test]
fn g5_a_destroyed_cache_leaves_an_rbd_image_as_it_once_was() {
    let _turn = one_at_a_time();
    let cluster = Cluster::up(&ClusterOptions::default()).expect("a cluster");
    let round = round(Some(&cluster), rng::seed(510)).expect("an exact state, and a loss that is bounded");
    println!("{round:?}");
}

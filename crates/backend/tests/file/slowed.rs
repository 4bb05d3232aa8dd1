//! Images that tests slow down or stop: a gate, and an emulated pool.

use super::{MIB, Scratch, uri};
use crate::common::{Driver, OURS, open, options, pattern};
use std::fs;
use std::path::Path;

#[test]
fn nothing_passes_a_closed_gate_and_everything_goes_on_when_it_opens() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = scratch.image(MIB as u64);
    let gate = scratch.0.join("gate");
    let opened =
        open(&format!("{}?gate={}", uri(&path), gate.display()), options(OURS)).expect("opened");
    let mut driver = Driver::new(opened.backend);
    driver.write(0, &pattern(1, 4096)).expect("a write");
    let before = driver.start_write(4096, &pattern(2, 4096));
    fs::write(&gate, "").expect("a gate");
    let behind = driver.start_write(0, &pattern(3, 4096));
    for _ in 0..50 {
        driver.poll(10);
        assert!(!driver.finished(before) && !driver.finished(behind), "passed the gate");
    }
    assert!(
        fs::read(&path).expect("the image")[..4096] == pattern(1, 4096),
        "written behind the gate"
    );
    fs::remove_file(&gate).expect("the gate");
    driver.wait(before).0.expect("a write");
    driver.wait(behind).0.expect("a write");
    assert!(driver.read(0, 8192) == [pattern(3, 4096), pattern(2, 4096)].concat());
    driver.close(true).expect("closed");
}

#[test]
fn an_emulated_pool_takes_its_time_and_keeps_the_data() {
    let scratch = Scratch::new(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let path = scratch.image(64 * MIB as u64);
    let mut mean_us = Vec::new();
    for pool in ["hdd", "ssd"] {
        let opened =
            open(&format!("{}?emulate={pool}&seed=3", uri(&path)), options(OURS)).expect("opened");
        let mut driver = Driver::new(opened.backend);
        let start = std::time::Instant::now();
        for i in 0..20u64 {
            driver.write(i * 3 * MIB as u64, &pattern(i, 4096)).expect("a write");
        }
        mean_us.push(start.elapsed().as_micros() / 20);
        let tokens: Vec<u64> =
            (0..20u64).map(|i| driver.start_read(i * 3 * MIB as u64, 4096)).collect();
        for (i, token) in tokens.into_iter().enumerate() {
            let (result, data) = driver.wait(token);
            result.expect("a read");
            assert!(*data == pattern(i as u64, 4096)[..]);
        }
        driver.close(true).expect("closed");
    }
    // A lower bound holds on the busiest machine too: the pool never answers too early.
    assert!(mean_us[0] > 4000 && mean_us[1] > 400, "{mean_us:?}");
}

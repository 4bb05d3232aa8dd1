use super::*;

fn data(sector: u64, values: &[u64]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * SECTOR_BYTES];
    for (i, part) in bytes.chunks_exact_mut(SECTOR_BYTES).enumerate() {
        fill(part, 7, sector + i as u64, values[i]);
    }
    bytes
}

fn written(c: &mut Checker, start: u64, end: u64, sector: u64, value: u64) {
    c.start_change(start, sector, 1, value, false);
    c.end_change(start, end, true, false);
}

#[test]
fn a_completed_write_must_be_read_and_an_older_one_must_not() {
    let mut c = Checker::new(7, 1 << 20, 0);
    written(&mut c, 10, 11, 3, 100);
    written(&mut c, 12, 13, 3, 200);
    assert!(c.end_read(14, 15, 3, &data(3, &[200])).is_ok());
    assert!(c.end_read(14, 15, 3, &data(3, &[100])).is_err());
    assert!(c.end_read(14, 15, 3, &data(3, &[0])).is_err());
    assert!(c.end_read(14, 15, 3, &data(4, &[200])).is_err(), "content of another sector");
}

#[test]
fn a_read_during_a_write_may_return_both_but_never_goes_back() {
    let mut c = Checker::new(7, 1 << 20, 1 << 20);
    c.start_change(10, 0, 2, 100, false);
    assert!(c.end_read(11, 12, 0, &data(0, &[BASE_VALUE, 100])).is_ok());
    assert!(c.end_read(13, 14, 0, &data(0, &[BASE_VALUE, 100])).is_ok());
    assert!(c.end_read(15, 16, 1, &data(1, &[BASE_VALUE])).is_err());
}

#[test]
fn a_read_that_began_before_a_write_ended_may_return_what_was_there() {
    let mut c = Checker::new(7, 1 << 20, 0);
    c.start_read(10);
    written(&mut c, 11, 12, 0, 100);
    assert!(c.end_read(10, 13, 0, &data(0, &[0])).is_ok());
    assert!(c.end_read(14, 15, 0, &data(0, &[0])).is_err());
}

#[test]
fn after_a_kill_what_was_in_flight_is_either_there_or_not() {
    for value in [100, 200] {
        let mut c = Checker::new(7, 1 << 20, 0);
        written(&mut c, 10, 11, 0, 100);
        c.start_change(12, 0, 1, 200, false);
        c.killed(13);
        assert!(c.end_read(14, 15, 0, &data(0, &[value])).is_ok());
        assert!(c.end_read(16, 17, 0, &data(0, &[300 - value])).is_err());
    }
}

fn after_power_loss(values: [u64; 2], flush_at: Option<u64>) -> Result<(), String> {
    let mut c = Checker::new(7, 1 << 20, 0);
    written(&mut c, 10, 11, 0, 100);
    written(&mut c, 13, 14, 9, 200);
    if let Some(at) = flush_at {
        c.flushed(at);
    }
    c.power_lost(20);
    for block in 0..2 {
        let mut bytes = data(block * 8, &[0; 8]);
        let at = block as usize;
        bytes[at * SECTOR_BYTES..][..SECTOR_BYTES]
            .copy_from_slice(&data(block * 9, &[values[block as usize]]));
        c.end_read(21, 22, block * 8, &bytes)?;
    }
    assert_eq!(c.to_verify(0), None, "everything of which the outcome was open has been looked at");
    c.end_verify(23)
}

#[test]
fn a_power_loss_may_take_a_tail_and_nothing_else() {
    assert!(after_power_loss([100, 200], None).is_ok());
    assert!(after_power_loss([100, 0], None).is_ok());
    assert!(after_power_loss([0, 0], None).is_ok());
    assert!(after_power_loss([0, 200], None).is_err(), "the first is lost, the second is not");
    assert!(after_power_loss([0, 0], Some(12)).is_err(), "the first was flushed");
    assert!(after_power_loss([100, 0], Some(12)).is_ok());
    assert!(after_power_loss([100, 0], Some(15)).is_err(), "both were flushed");
}

#[test]
fn a_change_past_the_log_goes_with_the_tail_until_a_flush_that_was_sent_after_it() {
    for (flush_at, ordered) in [(12, false), (15, true)] {
        let mut c = Checker::new(7, 1 << 20, 0);
        c.start_change(10, 0, 1, 100, true);
        c.end_change(10, 14, true, false);
        c.flushed(flush_at);
        written(&mut c, 16, 17, 8, 200);
        written(&mut c, 18, 19, 16, 300);
        c.power_lost(20);
        for (block, value) in [(0, if ordered { 100 } else { 0 }), (1, 0), (2, 300)] {
            let read = c.end_read(21, 22, block * 8, &data(block * 8, &[value]));
            assert!(read.is_ok(), "{flush_at}: {read:?}");
        }
        assert_eq!(c.end_verify(23).is_err(), ordered, "{flush_at}");
    }
}

#[test]
fn what_is_beyond_a_new_end_is_not_looked_at_after_a_power_loss() {
    let mut c = Checker::new(7, 2 * BLOCK_BYTES as u64, 0);
    written(&mut c, 10, 11, 0, 100);
    written(&mut c, 12, 13, SECTORS as u64, 200);
    c.power_lost(20);
    c.resize(BLOCK_BYTES as u64);
    assert_eq!((c.to_verify(0), c.to_verify(1)), (Some(0), None));
}

#[test]
fn a_flush_that_may_be_a_lie_promises_nothing() {
    let mut c = Checker::new(7, 1 << 20, 0);
    written(&mut c, 10, 11, 0, 100);
    written(&mut c, 12, 13, 0, 200);
    c.unsure_from = 14;
    c.flushed(15);
    c.power_lost(20);
    assert!(c.end_read(21, 22, 0, &data(0, &[100])).is_ok());
}

#[test]
fn a_record_that_was_damaged_after_its_flush_may_go_with_the_tail() {
    for (damaged_from, unsure_from, allowed) in
        [(0, 14, true), (0, u64::MAX, false), (14, 14, true), (u64::MAX, 14, false)]
    {
        let mut c = Checker::new(7, 1 << 20, 0);
        c.damaged_from = damaged_from;
        written(&mut c, 10, 11, 0, 100);
        written(&mut c, 14, 15, 0, 200);
        c.flushed(16);
        let later = (0..VERSIONS_KEPT as u64).map(|n| 17 + 2 * n);
        later.for_each(|tick| written(&mut c, tick, tick + 1, 0, 300));
        // What the device still proves is known only now.
        c.unsure_from = unsure_from;
        c.power_lost(100);
        let read = c.end_read(101, 102, 0, &data(0, &[100]));
        assert_eq!(read.is_ok(), allowed, "{damaged_from} {unsure_from}: {read:?}");
    }
}

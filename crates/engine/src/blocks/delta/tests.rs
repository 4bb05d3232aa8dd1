use super::*;

#[test]
fn a_delta_keeps_no_more_runs_than_it_has_use_for() {
    let mut delta = Delta::new();
    for i in 0..100_000u32 {
        delta.insert(u64::from(i % 100) * 7, 1, i * 2);
    }
    assert!(delta.runs.len() <= RUNS_MIN + 1, "{} runs", delta.runs.len());
    let current = |run: &Run| delta.index.lookup(run.block) == Lookup::At(run.position);
    assert_eq!(delta.runs.iter().filter(|run| current(run)).count(), 100);
}

/// All that is gathered of a closed delta, in portions.
fn gathered(delta: Delta, max: usize) -> Vec<(u64, Position)> {
    let mut closed = Closed::new(delta);
    let mut all = Vec::new();
    loop {
        let before = all.len();
        closed.gather_blocks(max, &mut |block, position| all.push((block, position)));
        assert!(all.len() - before <= max);
        if all.len() == before {
            return all;
        }
    }
}

#[test]
fn every_block_of_a_delta_is_gathered_once_however_its_runs_meet() {
    for runs in [
        vec![(10, 100, 1), (9, 101, 1), (8, 102, 1)],
        vec![(8, 102, 1), (9, 101, 1), (10, 100, 1)],
        vec![(8, 102, 1), (9, 103, 2), (11, 105, 1)],
        vec![(5, 100, 4), (20, 104, 2)],
        vec![(5, 100, 2), (7, 200, 1), (8, 201, 3)],
        vec![(5, 100, 3), (6, 103, 1), (2, 104, 4)],
    ] {
        let mut delta = Delta::new();
        let mut expected = std::collections::BTreeMap::new();
        for &(block, position, n) in &runs {
            delta.insert(block, n, position);
            expected.extend((0..n).map(|i| (block + u64::from(i), position + i)));
        }
        let mut all = gathered(delta, 3);
        all.sort_unstable();
        assert_eq!(all, expected.into_iter().collect::<Vec<_>>(), "{runs:?}");
    }
}

#[test]
fn a_delta_forgets_nothing_that_is_current_and_keeps_as_many_runs_as_it_has_blocks() {
    let mut delta = Delta::new();
    for i in 0..500u32 {
        // Only the last block of each run stays current.
        delta.insert(1_000_000 + u64::from(i) * 10, 3, 10_000_000 + i * 10);
        delta.insert(1_000_000 + u64::from(i) * 10, 2, 20_000_000 + i * 10);
    }
    for i in 0..60_000u32 {
        delta.insert(1 + u64::from(i % 5000) * 7, 1, i * 2);
        assert!(delta.runs.len() <= RUNS_MIN.max(2 * delta.index.blocks().at as usize) + 1);
    }
    assert_eq!(delta.index.blocks().at, 6500);
    assert_eq!(gathered(delta, 64).len(), 6500);
}

#[test]
fn all_zeroes_of_a_group_are_gathered_once_in_portions_that_end_with_their_objects() {
    const OBJECT: u64 = OBJECT_BLOCKS as u64;
    let mut delta = Delta::new();
    // A leaf of the index as a whole, and what has holes.
    delta.index.set_zero(0, 600 * OBJECT, &mut |_, _, _| ());
    for block in (601 * OBJECT..603 * OBJECT).step_by(5) {
        delta.index.set_zero(block, 3, &mut |_, _, _| ());
    }
    let zero = delta.index.blocks().zero;
    let mut closed = Closed::new(delta);
    let (mut at, mut blocks) = (0, 0);
    while !closed.is_gathered() {
        let mut portion = 0;
        closed.gather_zeroes(100, 1 << 30, &mut |object, block, n| {
            assert!(block >= at && block + u64::from(n) <= (u64::from(object) + 1) * OBJECT);
            assert!(block >= u64::from(object) * OBJECT);
            (at, blocks, portion) = (block + u64::from(n), blocks + u64::from(n), portion + 1);
        });
        assert!(portion <= 100);
    }
    assert_eq!(blocks, zero);
}

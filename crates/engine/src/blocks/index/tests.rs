use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// The model: what is known of each block that is not absent.
#[derive(Default)]
struct Model(BTreeMap<u64, Lookup>);

impl Model {
    fn get(&self, block: u64) -> Lookup {
        self.0.get(&block).copied().unwrap_or(Lookup::Absent)
    }

    fn set(&mut self, block: u64, n: u64, what: Lookup) -> BTreeMap<u64, Lookup> {
        let mut old = BTreeMap::new();
        for i in 0..n {
            let now = match what {
                Lookup::At(p) => Lookup::At(p + i as u32),
                other => other,
            };
            let before = match now {
                Lookup::Absent => self.0.remove(&(block + i)),
                _ => self.0.insert(block + i, now),
            };
            before.map(|b| old.insert(block + i, b));
        }
        old
    }

    fn blocks(&self) -> IndexBlocks {
        let count = |f: fn(&Lookup) -> bool| self.0.values().filter(|l| f(l)).count() as u64;
        IndexBlocks {
            at: count(|l| matches!(l, Lookup::At(_))),
            zero: count(|l| *l == Lookup::Zero),
            lost: count(|l| *l == Lookup::Lost),
        }
    }
}

fn spread(map: &mut BTreeMap<u64, Lookup>, block: u64, n: u32, what: Lookup) {
    for i in 0..n {
        let now = match what {
            Lookup::At(p) => Lookup::At(p + i),
            other => other,
        };
        assert_eq!(map.insert(block + u64::from(i), now), None, "block {block}+{i} reported twice");
    }
}

/// Applies a change to index and model; compares what both say was replaced.
fn change(index: &mut VolumeIndex, model: &mut Model, block: u64, n: u64, what: Lookup) {
    let mut replaced = BTreeMap::new();
    let mut report = |b, n, l| spread(&mut replaced, b, n, l);
    match what {
        Lookup::At(p) => index.insert(block, n as u32, p, &mut report),
        Lookup::Zero => index.set_zero(block, n, &mut report),
        Lookup::Lost => index.set_lost(block, n, &mut report),
        Lookup::Absent => index.remove(block, n, &mut report),
    }
    assert_eq!(replaced, model.set(block, n, what));
}

/// Compares everything that can be asked.
fn compare(index: &VolumeIndex, model: &Model, blocks: u64) {
    assert_eq!(index.blocks(), model.blocks());
    for block in 0..blocks {
        assert_eq!(index.lookup(block), model.get(block), "block {block}");
    }
    let mut listed = BTreeMap::new();
    let mut previous = None;
    for object in index.objects(0) {
        assert!(previous < Some(object));
        previous = Some(object);
        for (block, n, what) in index.runs(object) {
            assert_eq!(block / OBJECT, u64::from(object));
            spread(&mut listed, block, n, what);
        }
    }
    assert_eq!(listed, model.0);
    for object in 0..blocks.div_ceil(OBJECT) as usize {
        check_table(index, object);
    }
}

/// The invariants of one table: sorted, disjoint, and a run that the next one continues is full.
fn check_table(index: &VolumeIndex, object: usize) {
    let entry = index.entry(object);
    if entry.size == FLAT {
        assert_eq!(entry.gap(), ABSENT);
        return;
    }
    let table = index.table_of(object);
    for i in 0..table.len() {
        let run = table.run(i);
        assert!(run.end() as usize <= OBJECT_BLOCKS);
        assert_ne!(run.value, entry.gap(), "object {object}: a run that says what gaps say");
        if i + 1 < table.len() {
            let next = table.run(i + 1);
            assert!(run.end() <= next.start, "object {object}: runs {i} and {} overlap", i + 1);
            let continued =
                run.end() == next.start && table::advance(run.value, run.blocks) == next.value;
            assert!(
                !continued || run.blocks == RUN_BLOCKS_MAX,
                "object {object}: run {i} is continued and not full"
            );
        }
    }
}

/// Checks `lookup_run` from a block against the model.
fn compare_run(index: &VolumeIndex, model: &Model, block: u64, max: u32) {
    let (what, n) = index.lookup_run(block, max);
    assert!(n <= max && (n > 0 || max == 0));
    for i in 0..n {
        let expected = match what {
            Lookup::At(p) => Lookup::At(p + i),
            other => other,
        };
        assert_eq!(model.get(block + u64::from(i)), expected);
    }
    let next = block + u64::from(n);
    if n < max && !next.is_multiple_of(OBJECT) {
        let longer = match what {
            Lookup::At(p) => Lookup::At(p + n),
            other => other,
        };
        assert_ne!(model.get(next), longer, "the stretch from {block} is longer than {n}");
    }
}

const BLOCKS: u64 = 3 * OBJECT;

#[derive(Debug, Clone)]
enum Step {
    Set(u64, u64, Lookup),
    RemoveIf(u64, bool),
    ReplaceIf(u64, bool, u32),
    Run(u64, u32),
    ForgetZeroes(u32),
    Truncate(u64),
    Flags(u32, u8, bool),
}

fn what() -> impl Strategy<Value = Lookup> {
    prop_oneof![
        // Few positions, so that contiguity across separate changes happens.
        6 => (0u32..4096).prop_map(Lookup::At),
        1 => (POSITION_END - 5000..POSITION_END - 3 * OBJECT as u32).prop_map(Lookup::At),
        2 => Just(Lookup::Zero),
        1 => Just(Lookup::Lost),
        4 => Just(Lookup::Absent),
    ]
}

fn stretch() -> impl Strategy<Value = (u64, u64)> {
    let around_border =
        (1u64..3, 0u64..80, 1u64..160).prop_map(|(o, back, n)| (o * OBJECT - back, n));
    prop_oneof![
        4 => (0..BLOCKS, 1u64..=4),
        4 => (0..BLOCKS, 1u64..=200),
        2 => around_border,
        1 => (0..BLOCKS, 1..=BLOCKS),
        1 => (0u64..3, 1u64..=3).prop_map(|(o, n)| (o * OBJECT, n * OBJECT)),
    ]
    .prop_map(|(block, n)| (block, n.min(BLOCKS - block)))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        30 => (stretch(), what()).prop_map(|((b, n), w)| Step::Set(b, n, w)),
        // As a log does it: the same positions as the blocks, so that neighbours join.
        20 => stretch().prop_map(|(b, n)| Step::Set(b, n, Lookup::At(b as u32))),
        4 => (0..BLOCKS, any::<bool>()).prop_map(|(b, hit)| Step::RemoveIf(b, hit)),
        4 => (0..BLOCKS, any::<bool>(), 0u32..4096).prop_map(|(b, hit, new)| Step::ReplaceIf(b, hit, new)),
        8 => (0..BLOCKS, 0u32..3000).prop_map(|(b, max)| Step::Run(b, max)),
        1 => (0u32..3).prop_map(Step::ForgetZeroes),
        1 => (0..BLOCKS).prop_map(Step::Truncate),
        2 => (0u32..3, 1u8..8, any::<bool>()).prop_map(|(o, f, set)| Step::Flags(o, f, set)),
    ]
}

fn run_steps(steps: &[Step]) {
    let (mut index, mut model, mut flags) = (VolumeIndex::new(), Model::default(), [0u8; 3]);
    for step in steps {
        match *step {
            Step::Set(block, n, what) => change(&mut index, &mut model, block, n, what),
            Step::RemoveIf(block, hit) => {
                let position = aim(&model, block, hit);
                assert_eq!(
                    index.remove_if(block, position),
                    model.get(block) == Lookup::At(position)
                );
                if model.get(block) == Lookup::At(position) {
                    model.set(block, 1, Lookup::Absent);
                }
            }
            Step::ReplaceIf(block, hit, new) => {
                let position = aim(&model, block, hit);
                assert_eq!(
                    index.replace_if(block, position, new),
                    model.get(block) == Lookup::At(position)
                );
                if model.get(block) == Lookup::At(position) {
                    model.set(block, 1, Lookup::At(new));
                }
            }
            Step::Run(block, max) => compare_run(&index, &model, block, max),
            Step::ForgetZeroes(object) => {
                index.forget_zeroes(object);
                model.0.retain(|b, l| b / OBJECT != u64::from(object) || *l != Lookup::Zero);
            }
            Step::Truncate(blocks) => {
                let mut replaced = BTreeMap::new();
                index.truncate(blocks, &mut |b, n, l| spread(&mut replaced, b, n, l));
                assert_eq!(replaced, model.0.split_off(&blocks));
                flags[blocks.div_ceil(OBJECT) as usize..].fill(0);
            }
            Step::Flags(object, bits, true) => {
                index.set_flags(object, ObjectFlags(bits));
                flags[object as usize] |= bits;
            }
            Step::Flags(object, bits, false) => {
                index.clear_flags(object, ObjectFlags(bits));
                flags[object as usize] &= !bits;
            }
        }
        for object in 0..3 {
            assert_eq!(index.flags(object), ObjectFlags(flags[object as usize]));
        }
        assert_eq!(index.blocks(), model.blocks());
    }
    compare(&index, &model, BLOCKS);
    index.truncate(0, &mut |_, _, _| ());
    assert_eq!(index.blocks(), IndexBlocks::default());
    assert_eq!(index.objects(0).count(), 0);
}

/// The block's position, if it has one and `hit` asks for it; else some other.
fn aim(model: &Model, block: u64, hit: bool) -> Position {
    match model.get(block) {
        Lookup::At(p) if hit => p,
        _ => 4711,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_changes_is_found_again(steps in prop::collection::vec(step(), 1..150)) {
        run_steps(&steps);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    // Long sequences of single blocks: the tables become flat and run tables again.
    #[test]
    fn many_single_blocks_are_found_again(seed in any::<u64>(), zero_base in any::<bool>()) {
        let (mut index, mut model) = (VolumeIndex::new(), Model::default());
        if zero_base {
            change(&mut index, &mut model, 0, BLOCKS, Lookup::Zero);
        }
        let mut random = Random(seed);
        let mut flat_seen = 0;
        for phase in 0..6 {
            let removes = [10, 90, 30, 80, 5, 100][phase];
            for _ in 0..3000 {
                let block = random.below(BLOCKS);
                let what = match random.below(100) {
                    r if r < removes => if (r % 8 == 0) != zero_base { Lookup::Zero } else { Lookup::Absent },
                    _ => Lookup::At(random.below(1 << 30) as u32),
                };
                change(&mut index, &mut model, block, 1, what);
            }
            flat_seen += (0..3).filter(|&o| index.entry(o).size == FLAT).count();
            compare(&index, &model, BLOCKS);
        }
        prop_assert!(flat_seen > 0, "no table ever became flat");
        change(&mut index, &mut model, 0, BLOCKS, Lookup::At(5000));
        prop_assert!((0..3).all(|o| index.runs_len(o) <= 17), "a rewritten object keeps a long table");
        compare(&index, &model, BLOCKS);
    }
}

// Many objects, so that tables of one size fill more than a page and take each other's places.
#[test]
fn tables_of_many_objects_do_not_get_mixed_up() {
    const OBJECTS: u64 = 600;
    let (mut index, mut model, mut random) = (VolumeIndex::new(), Model::default(), Random(42));
    for round in 0..8 {
        for _ in 0..12_000 {
            let block = random.below(OBJECTS * OBJECT - 8);
            let what = match random.below(10) {
                r if r < 2 + round % 2 * 6 => Lookup::Absent,
                2 => Lookup::Zero,
                _ => Lookup::At(random.below(1 << 30) as u32),
            };
            // Removals reach further, so that tables become short and empty again.
            let n = if what == Lookup::Absent { random.below(400) } else { random.below(4) };
            change(&mut index, &mut model, block, n.min(OBJECTS * OBJECT - block), what);
        }
        compare(&index, &model, OBJECTS * OBJECT);
    }
}

/// A small deterministic generator (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

#[test]
fn a_discarded_volume_costs_a_step_for_each_stretch_of_the_directory() {
    let mut index = VolumeIndex::new();
    let blocks = (64u64 << 40) / 4096;
    index.set_zero(0, blocks, &mut |_, _, _| panic!("nothing was there"));
    assert_eq!(index.blocks().zero, blocks);
    assert_eq!(index.lookup(blocks - 1), Lookup::Zero);
    assert_eq!(index.lookup(blocks), Lookup::Absent);
    assert!(index.memory_bytes() < 2 << 20, "{} bytes", index.memory_bytes());
    let mut replaced = 0;
    index.remove(0, blocks, &mut |_, n, what| {
        assert_eq!(what, Lookup::Zero);
        replaced += u64::from(n);
    });
    assert_eq!((replaced, index.blocks()), (blocks, IndexBlocks::default()));
}

#[test]
fn a_huge_volume_costs_what_is_cached_of_it() {
    let mut index = VolumeIndex::new();
    let blocks = (64u64 << 40) / 4096;
    for i in 0..1000 {
        index.insert(i * (blocks / 1000), 1, i as u32, &mut |_, _, _| ());
    }
    assert_eq!(index.objects(0).count(), 1000);
    assert!(index.memory_bytes() < 8 << 20, "{} bytes", index.memory_bytes());
    index.remove(0, blocks, &mut |_, _, _| ());
    assert!(
        index.leaves.iter().all(|l| matches!(l, Leaf::Uniform(_))),
        "an empty stretch keeps its entries"
    );
}

#[test]
fn marking_each_object_in_turn_ends_in_a_uniform_directory() {
    let mut index = VolumeIndex::new();
    index.set_zero(0, 4 * LEAF, &mut |_, _, _| ());
    for object in 0..4 * LEAF_OBJECTS as u32 {
        index.set_flags(object, ObjectFlags::ZERO_DIRTY | ObjectFlags::QUEUED);
    }
    assert!(index.leaves.iter().all(|l| matches!(l, Leaf::Uniform(_))));
    assert!(
        index.flags(700).contains(ObjectFlags::QUEUED)
            && !index.flags(700).intersects(ObjectFlags::DRAINING)
    );
    assert_eq!(index.lookup(5000), Lookup::Zero);
}

#[test]
fn stretches_written_in_pieces_end_as_few_runs() {
    let mut index = VolumeIndex::new();
    let mut order: Vec<u64> = (0..OBJECT).collect();
    let mut random = Random(1);
    for i in (1..order.len()).rev() {
        order.swap(i, random.below(i as u64 + 1) as usize);
    }
    for &block in &order {
        index.insert(block, 1, 1000 + block as u32, &mut |_, _, _| ());
    }
    assert!(index.runs_len(0) <= UNIFORM_RUNS_MAX, "{} runs", index.runs_len(0));
    assert_eq!(index.lookup_run(0, 5000), (Lookup::At(1000), 1024));
    for &block in &order {
        index.set_zero(block, 1, &mut |_, _, _| ());
    }
    assert_eq!((index.runs_len(0), index.lookup_run(0, 5000)), (0, (Lookup::Zero, 1024)));
}

#[test]
#[should_panic(expected = "beyond the largest cache device")]
fn a_position_that_means_something_else_is_refused() {
    VolumeIndex::new().insert(0, 2, POSITION_END - 1, &mut |_, _, _| ());
}

/// Bytes for each cached block, all told: the index, the marks of as many device blocks with a
/// header for every 64, and the ghost of such a device.
fn all_bytes(index: &VolumeIndex) -> f64 {
    let blocks = index.blocks().at as usize;
    let marks = crate::blocks::marks::Marks::new(blocks + blocks / 64).memory_bytes();
    let ghost = crate::cache::ghost::Ghost::for_device(blocks + blocks / 64).memory_bytes();
    (index.memory_bytes() + marks + ghost) as f64 / blocks as f64
}

#[test]
fn a_block_cached_at_random_costs_less_than_twelve_bytes() {
    const CACHED: usize = 1_000_000;
    let (mut index, mut random) = (VolumeIndex::new(), Random(7));
    let mut cached = std::collections::VecDeque::with_capacity(CACHED);
    let mut worst: f64 = 0.0;
    // Filled, then half of it replaced in the order of its age.
    for position in 0..CACHED as u32 / 2 * 3 {
        let block = loop {
            let block = random.below(10 * CACHED as u64);
            if index.lookup(block) == Lookup::Absent {
                break block;
            }
        };
        if cached.len() == CACHED {
            let oldest = cached.pop_front().expect("a full cache");
            assert!(index.remove_if(oldest, position - CACHED as u32));
        }
        index.insert(block, 1, position, &mut |_, _, _| panic!("the block was absent"));
        cached.push_back(block);
        if cached.len() == CACHED && position % 4096 == 0 {
            worst = worst.max(all_bytes(&index));
        }
    }
    println!("{worst:.2} bytes for each block cached at random");
    assert_eq!(index.blocks().at, CACHED as u64);
    assert!(worst <= 12.0, "{worst:.2} bytes");
}

#[test]
fn a_block_cached_in_sequence_costs_less_than_five_bytes() {
    const CACHED: u32 = 1 << 20;
    let mut index = VolumeIndex::new();
    for record in 0..CACHED / 64 {
        index.insert(u64::from(record) * 64, 64, record * 65 + 1, &mut |_, _, _| ());
    }
    let bytes = all_bytes(&index);
    println!("{bytes:.2} bytes for each block cached in sequence");
    assert!(bytes <= 5.0, "{bytes:.2} bytes");
}

#[test]
fn memory_follows_what_is_cached_down_again() {
    let (mut index, mut random) = (VolumeIndex::new(), Random(3));
    let mut cached = Vec::new();
    for position in 0..200_000 {
        let block = random.below(600_000);
        index.insert(block, 1, position, &mut |_, _, _| ());
        cached.push(block);
    }
    let full = index.memory_bytes();
    cached.drain(..180_000).for_each(|block| index.remove(block, 1, &mut |_, _, _| ()));
    let bytes = index.memory_bytes();
    assert!(bytes < full / 5, "{bytes} bytes of {full} are left for a tenth of the blocks");
    cached.iter().for_each(|&block| index.remove(block, 1, &mut |_, _, _| ()));
    assert!(index.memory_bytes() < 64 << 10, "{} bytes for nothing", index.memory_bytes());
}

#[test]
fn a_stretch_ends_with_its_part_of_the_directory() {
    let mut index = VolumeIndex::new();
    index.set_zero(0, LEAF, &mut |_, _, _| ());
    index.insert(LEAF, 1, 7, &mut |_, _, _| ());
    assert_eq!(index.lookup_run(LEAF - 10, 100), (Lookup::Zero, 10));
    assert_eq!(index.lookup_run(LEAF - 3 * OBJECT, 10_000), (Lookup::Zero, 3 * OBJECT as u32));
}

#[test]
fn a_discard_ends_where_it_was_asked_to() {
    let mut index = VolumeIndex::new();
    index.set_zero(LEAF, OBJECT, &mut |_, _, _| ());
    assert_eq!((index.lookup(LEAF), index.lookup(LEAF + OBJECT)), (Lookup::Zero, Lookup::Absent));
    assert_eq!(index.blocks().zero, OBJECT);
}

#[test]
fn what_a_part_of_the_directory_held_is_told_with_its_place() {
    let (mut index, mut replaced) = (VolumeIndex::new(), Vec::new());
    index.set_zero(LEAF, 2 * LEAF, &mut |_, _, _| panic!("nothing was there"));
    index.remove(0, 3 * LEAF, &mut |block, n, what| replaced.push((block, n, what)));
    let part = LEAF as u32;
    assert_eq!(replaced, [(LEAF, part, Lookup::Zero), (2 * LEAF, part, Lookup::Zero)]);
}

#[test]
fn a_volume_that_shrinks_forgets_all_behind_its_new_end() {
    let (mut index, objects) = (VolumeIndex::new(), LEAF_OBJECTS as u32);
    index.set_zero(0, 3 * LEAF, &mut |_, _, _| ());
    index.insert(3 * LEAF - 1, 1, 9, &mut |_, _, _| ());
    for object in 0..3 * objects {
        index.set_flags(object, ObjectFlags::ZERO_DIRTY);
    }
    let end = LEAF + 2 * OBJECT + 1;
    index.truncate(end, &mut |_, _, _| ());
    assert_eq!(index.blocks(), IndexBlocks { zero: end, ..IndexBlocks::default() });
    for object in 0..3 * objects {
        let kept = object <= objects + 2;
        assert_eq!(index.flags(object).contains(ObjectFlags::ZERO_DIRTY), kept, "object {object}");
    }
}

#[test]
fn the_largest_volume_can_shrink() {
    let mut index = VolumeIndex::new();
    index.set_zero(0, BLOCKS_MAX, &mut |_, _, _| ());
    index.truncate(BLOCKS_MAX / 2, &mut |_, _, _| ());
    assert_eq!(index.blocks().zero, BLOCKS_MAX / 2);
}

#[test]
fn objects_are_listed_from_any_one_on() {
    let (mut index, objects) = (VolumeIndex::new(), LEAF_OBJECTS as u32);
    let mut expected = vec![3, objects + 3, objects + 8, 4 * objects - 1];
    for (i, &object) in expected.iter().enumerate() {
        index.insert(u64::from(object) * OBJECT + 5, 1, i as u32, &mut |_, _, _| ());
    }
    // All objects of this part are zero and have no entries of their own.
    index.set_zero(2 * LEAF, LEAF, &mut |_, _, _| ());
    expected.extend(2 * objects..3 * objects);
    expected.sort();
    for from in 0..=5 * objects {
        let listed: Vec<u32> = index.objects(from).collect();
        let first = expected.partition_point(|&object| object < from);
        assert_eq!(listed, expected[first..], "from {from}");
    }
}

/// An object of which each block is somewhere else, so that its table is flat.
fn scattered() -> (VolumeIndex, Model) {
    let (mut index, mut model) = (VolumeIndex::new(), Model::default());
    for block in 0..OBJECT {
        change(&mut index, &mut model, block, 1, Lookup::At(5000 - block as u32));
    }
    assert_eq!(index.entry(0).size, FLAT);
    (index, model)
}

#[test]
fn an_object_of_scattered_blocks_costs_less_again_when_few_are_left() {
    let (mut index, mut model) = scattered();
    for block in 100..OBJECT {
        change(&mut index, &mut model, block, 1, Lookup::Absent);
    }
    compare(&index, &model, OBJECT);
    assert_eq!(index.runs_len(0), 100);
}

#[test]
fn an_object_of_scattered_blocks_costs_less_again_when_it_is_written_in_sequence() {
    let (mut index, mut model) = scattered();
    change(&mut index, &mut model, 1, 1020, Lookup::At(10_000));
    compare(&index, &model, OBJECT);
    assert_eq!(index.runs_len(0), 1 + 16 + 3);
}

#[test]
fn an_object_of_scattered_blocks_costs_nothing_when_none_is_left() {
    for (what, objects) in [(Lookup::Absent, 0), (Lookup::Zero, 1)] {
        let (mut index, mut model) = scattered();
        change(&mut index, &mut model, 0, 1, what);
        change(&mut index, &mut model, 1, OBJECT - 1, what);
        compare(&index, &model, OBJECT);
        assert_eq!((index.runs_len(0), index.objects(0).count()), (0, objects));
    }
}

#[test]
fn zeroes_that_are_forgotten_in_pieces_leave_nothing() {
    let mut index = VolumeIndex::new();
    index.set_zero(0, OBJECT, &mut |_, _, _| ());
    for block in 0..OBJECT {
        index.remove(block, 1, &mut |_, _, _| ());
    }
    assert_eq!((index.runs_len(0), index.objects(0).count()), (0, 0));
}

#[test]
fn a_table_that_becomes_short_at_once_or_by_and_by_takes_little_room() {
    const OBJECTS: u64 = 600;
    let mut index = VolumeIndex::new();
    for first in (0..OBJECTS).map(|object| object * OBJECT) {
        for i in 0..300 {
            index.insert(first + 3 * i, 1, i as u32, &mut |_, _, _| ());
        }
    }
    let full = index.memory_bytes();
    for object in 0..OBJECTS {
        let first = object * OBJECT;
        if object % 2 == 0 {
            index.remove(first + 6, OBJECT - 6, &mut |_, _, _| ());
        } else {
            (2..300).for_each(|i| index.remove(first + 3 * i, 1, &mut |_, _, _| ()));
        }
    }
    assert_eq!(index.blocks().at, 2 * OBJECTS);
    let bytes = index.memory_bytes();
    assert!(bytes < full / 15, "{bytes} bytes of {full} are left for two blocks of 300");
}

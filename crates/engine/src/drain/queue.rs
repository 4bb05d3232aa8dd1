//! The queue of objects with something to drain, the oldest first.
//!
//! An object with the flag [`ObjectFlags::QUEUED`] is in the queue, and only this file sets and
//! clears that flag.

use crate::api::Nanos;
use crate::base::mutation::mutated;
use crate::blocks::index::ObjectFlags;
use crate::blocks::ledger::Ledger;
use std::collections::VecDeque;

/// Entries of the queue for which memory is kept.
const ROOM_KEPT: usize = 4096;

/// An object with something to drain.
#[derive(Debug, Clone, Copy)]
pub(super) struct DirtyObject {
    pub(super) object: u32,
    /// Oldest record that may have dirtied it.
    pub(super) first_sequence: u64,
    pub(super) since: Nanos,
    /// Nothing of it can be drained before everything up to this sequence is committed (grouped
    /// drain).
    pub(super) drain_from: u64,
    /// When everything up to this sequence is committed, `first_sequence` becomes `then_first`.
    pub(super) wait_for: u64,
    /// Older content than this of what a drain has left out is superseded in the redo then.
    pub(super) then_first: u64,
}

impl DirtyObject {
    /// An object that is dirty since the record `sequence`, and that nothing but the order of the
    /// queue keeps from the drain.
    pub(super) fn since(object: u32, sequence: u64, now: Nanos) -> DirtyObject {
        let (first_sequence, then_first) = (sequence, sequence);
        DirtyObject { object, first_sequence, since: now, drain_from: 0, wait_for: 0, then_first }
    }

    /// The drain waits until everything up to `sequence` is committed.
    pub(super) fn waiting(self, sequence: u64) -> DirtyObject {
        DirtyObject { drain_from: sequence, wait_for: sequence, ..self }
    }
}

/// Objects of a volume that wait for the drain, by their first sequence.
#[derive(Default)]
pub(super) struct Queue {
    objects: VecDeque<DirtyObject>,
    /// Entries before this one cannot be drained for now.
    cursor: usize,
}

impl Queue {
    /// The object that is dirty for longest.
    pub(super) fn front(&self) -> Option<&DirtyObject> {
        self.objects.front()
    }

    /// The first object that may be drained, if one may.
    pub(super) fn next(&self) -> Option<&DirtyObject> {
        self.objects.get(self.cursor)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &DirtyObject> {
        self.objects.iter()
    }

    /// Everything is looked at again.
    pub(super) fn look_again(&mut self) {
        self.cursor = 0;
    }

    /// Finds the first object from the cursor on for which `is_free` holds, and goes on there the
    /// next time: its place, and since when it is dirty.
    pub(super) fn find(
        &mut self,
        is_free: impl Fn(&DirtyObject) -> bool,
    ) -> Option<(usize, Nanos)> {
        let from = self.cursor.min(self.objects.len());
        let at = self.objects.range(from..).position(is_free).map(|n| from + n);
        self.cursor = at.unwrap_or(self.objects.len());
        at.map(|at| (at, self.objects[at].since))
    }

    /// Notes that an object has something to drain, unless it is in the queue.
    pub(super) fn note(&mut self, ledger: &mut Ledger, dirty: DirtyObject) {
        if !ledger.flags(dirty.object).contains(ObjectFlags::QUEUED) {
            ledger.mark(dirty.object, ObjectFlags::QUEUED);
            self.objects.push_back(dirty);
        }
    }

    /// Takes the object at place `at` out, to be drained.
    pub(super) fn begin(&mut self, ledger: &mut Ledger, at: usize) -> DirtyObject {
        let taken = self.take(at);
        ledger.unmark(taken.object, ObjectFlags::QUEUED);
        ledger.mark(taken.object, ObjectFlags::DRAINING);
        taken
    }

    /// Takes an object out. A queue that was long once, as after a discard of the whole volume,
    /// gives its memory back.
    fn take(&mut self, at: usize) -> DirtyObject {
        let taken = self.objects.remove(at).expect("it was found in the queue");
        let (len, room) = (self.objects.len(), self.objects.capacity());
        if room > ROOM_KEPT && len < room / 4 {
            self.objects.shrink_to((2 * len).max(ROOM_KEPT));
        }
        taken
    }

    /// Puts an object back into the queue at the place of its sequence (a failed or partial drain).
    pub(super) fn requeue(&mut self, ledger: &mut Ledger, mut entry: DirtyObject) {
        if ledger.flags(entry.object).contains(ObjectFlags::QUEUED) {
            let at = self.objects.iter().position(|d| d.object == entry.object);
            let queued = self.take(at.expect("an object with the flag is in the queue"));
            let (wait_for, then_first) = match () {
                // What is newer than the promise of the one does not touch it.
                () if queued.first_sequence >= entry.then_first => {
                    (entry.wait_for, entry.then_first)
                }
                () if entry.first_sequence >= queued.then_first => {
                    (queued.wait_for, queued.then_first)
                }
                () => {
                    (entry.wait_for.max(queued.wait_for), entry.then_first.min(queued.then_first))
                }
            };
            (entry.wait_for, entry.then_first) = (wait_for, then_first);
            let older = entry.first_sequence.min(queued.first_sequence);
            entry.first_sequence =
                if mutated!(RequeuedAsNewer) { queued.first_sequence } else { older };
            entry.since = entry.since.min(queued.since);
            entry.drain_from = entry.drain_from.min(queued.drain_from);
        }
        ledger.mark(entry.object, ObjectFlags::QUEUED);
        let at = self.objects.partition_point(|d| d.first_sequence < entry.first_sequence);
        self.objects.insert(at, entry);
        self.cursor = self.cursor.min(at);
    }

    /// Something of a queued object can be drained at once, whatever the rest waits for.
    pub(super) fn again(&mut self, object: u32) {
        let at = self.objects.iter().position(|dirty| dirty.object == object);
        let at = at.expect("an object with the flag is in the queue");
        self.objects[at].drain_from = 0;
        self.cursor = self.cursor.min(at);
    }

    /// Nothing that is queued can be drained before everything up to `sequence` is committed.
    pub(super) fn hold(&mut self, sequence: u64) {
        self.objects.iter_mut().for_each(|dirty| *dirty = dirty.waiting(sequence));
    }

    /// Everything up to `sequence` is committed: what waited for that can be drained.
    pub(super) fn commit(&mut self, sequence: u64) {
        let mut moved = false;
        for dirty in &mut self.objects {
            if dirty.wait_for <= sequence && dirty.first_sequence < dirty.then_first {
                dirty.first_sequence = dirty.then_first;
                moved = true;
            }
        }
        if moved {
            self.objects.make_contiguous().sort_by_key(|dirty| dirty.first_sequence);
        }
        self.cursor = 0;
    }

    /// Of these objects, in order of their numbers, something is to be brought to the image as it
    /// was at `sequence`: those that are neither in the queue nor being drained are put into it.
    pub(super) fn hurry(
        &mut self,
        ledger: &mut Ledger,
        objects: &[u32],
        sequence: u64,
        now: Nanos,
    ) {
        for dirty in
            self.objects.iter_mut().filter(|dirty| objects.binary_search(&dirty.object).is_ok())
        {
            dirty.drain_from = dirty.drain_from.min(sequence);
        }
        self.cursor = 0;
        for &object in objects {
            if !ledger.flags(object).intersects(ObjectFlags::QUEUED | ObjectFlags::DRAINING) {
                self.requeue(ledger, DirtyObject::since(object, sequence, now).waiting(sequence));
            }
        }
    }

    /// Goes through the objects that are dirty since `sequence` or before: those for which
    /// `is_clean` holds leave the queue, the others are dirty since the record after it.
    pub(super) fn drain_until(
        &mut self,
        ledger: &mut Ledger,
        sequence: u64,
        mut is_clean: impl FnMut(&mut Ledger, u32) -> bool,
    ) {
        let until = self.objects.partition_point(|dirty| dirty.first_sequence <= sequence);
        let mut left = Vec::new();
        for dirty in self.objects.drain(..until) {
            if is_clean(ledger, dirty.object) {
                ledger.unmark(dirty.object, ObjectFlags::QUEUED);
            } else {
                left.push(DirtyObject { first_sequence: sequence + 1, ..dirty });
            }
        }
        left.into_iter().rev().for_each(|dirty| self.objects.push_front(dirty));
        self.cursor = 0;
    }

    /// The volume has no object from `first` on any more.
    pub(super) fn truncate(&mut self, ledger: &mut Ledger, first: u32) {
        let before = self.objects.len();
        self.objects.retain(|dirty| dirty.object < first);
        ledger.drop_marked((before - self.objects.len()) as u64);
        self.cursor = 0;
    }

    /// The volume has nothing any more.
    pub(super) fn clear(&mut self) {
        self.objects.clear();
        self.cursor = 0;
    }

    /// What waits for groups does not wait any more: it is not known which.
    pub(super) fn forget_groups(&mut self) {
        for dirty in &mut self.objects {
            *dirty = DirtyObject {
                drain_from: 0,
                wait_for: 0,
                then_first: dirty.first_sequence,
                ..*dirty
            };
        }
        self.cursor = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_of_dirty_objects_gives_back_the_memory_of_its_longest_days() {
        let (mut queue, mut ledger) = (Queue::default(), Ledger::new());
        (0..1_000_000).for_each(|object| queue.note(&mut ledger, DirtyObject::since(object, 1, 0)));
        let longest = queue.objects.capacity();
        for object in 0..999_000 {
            assert_eq!(queue.take(0).object, object);
        }
        let room = queue.objects.capacity();
        assert!(room < longest / 64, "room for {room} objects of which 1000 are left");
        assert_eq!(queue.take(999).object, 999_999);
    }

    fn dirty(object: u32, first_sequence: u64, wait_for: u64, then_first: u64) -> DirtyObject {
        DirtyObject { object, first_sequence, since: 0, drain_from: 0, wait_for, then_first }
    }

    /// Since which record an object that is alone in the queue is dirty when everything up to
    /// `sequence` is committed.
    fn first_at(queued: &[DirtyObject], sequence: u64) -> u64 {
        let (mut queue, mut ledger) = (Queue::default(), Ledger::new());
        queued.iter().for_each(|&entry| queue.requeue(&mut ledger, entry));
        queue.commit(sequence);
        assert_eq!(queue.objects.len(), 1);
        queue.objects[0].first_sequence
    }

    #[test]
    fn an_object_that_comes_back_from_the_drain_waits_for_what_either_needs_and_for_no_more() {
        let mut entries = Vec::new();
        for (first, wait_for) in [(1, 3), (1, 5), (2, 3), (2, 5), (3, 4), (4, 5)] {
            entries.extend((first..6).map(|then_first| dirty(5, first, wait_for, then_first)));
        }
        for &came_back in &entries {
            for &queued in &entries {
                let apart =
                    |sequence| first_at(&[came_back], sequence).min(first_at(&[queued], sequence));
                let touched = queued.first_sequence < came_back.then_first
                    && came_back.first_sequence < queued.then_first;
                for sequence in 2..7 {
                    let first = first_at(&[queued, came_back], sequence);
                    let exact = !touched || sequence == 2 || sequence == 6;
                    assert!(
                        first <= apart(sequence),
                        "{came_back:?} with {queued:?} at {sequence}"
                    );
                    assert!(
                        !exact || first == apart(sequence),
                        "{came_back:?} with {queued:?} at {sequence}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_object_that_is_dirty_for_longest_stands_first() {
        let (mut queue, mut ledger) = (Queue::default(), Ledger::new());
        for (object, first) in [(0, 5), (1, 9), (2, 2), (3, 7), (4, 1), (5, 12), (6, 7)] {
            queue.requeue(&mut ledger, dirty(object, first, 20, 30 - first));
            assert!(queue.objects.iter().is_sorted_by_key(|entry| entry.first_sequence));
        }
        queue.commit(19);
        assert_eq!(queue.objects[0].first_sequence, 1);
        queue.commit(20);
        assert!(queue.objects.iter().is_sorted_by_key(|entry| entry.first_sequence));
        assert_eq!(queue.objects[0].first_sequence, 18);
        assert_eq!(queue.objects.len(), 7);
    }
}

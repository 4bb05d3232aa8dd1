//! A table of operations in flight, with a fixed capacity.

/// Marks the end of the free list.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
enum Slot<T> {
    Used(T),
    Free { next: u32 },
}

/// Values that are named by small numbers, their slots. All memory is allocated when the slab is
/// made.
#[derive(Debug)]
pub struct Slab<T> {
    slots: Box<[Slot<T>]>,
    free: u32,
    len: usize,
}

impl<T> Slab<T> {
    /// A slab with room for `capacity` values.
    pub fn new(capacity: usize) -> Slab<T> {
        assert!(capacity < NONE as usize, "a slab names its slots with 32 bits");
        let slots: Box<[Slot<T>]> = (1..=capacity as u32)
            .map(|next| Slot::Free { next: if next as usize == capacity { NONE } else { next } })
            .collect();
        Slab { free: if capacity == 0 { NONE } else { 0 }, slots, len: 0 }
    }

    /// Inserts a value and returns its slot. When there is no room, drops the value and returns
    /// `None`.
    pub fn insert(&mut self, value: T) -> Option<u32> {
        let slot = self.free;
        if slot == NONE {
            return None;
        }
        let Slot::Free { next } =
            std::mem::replace(&mut self.slots[slot as usize], Slot::Used(value))
        else {
            unreachable!("the free list names slots in use");
        };
        self.free = next;
        self.len += 1;
        Some(slot)
    }

    /// Removes and returns the value in a slot.
    ///
    /// # Panics
    /// If the slot holds no value, as when an operation completes twice.
    pub fn remove(&mut self, slot: u32) -> T {
        let vacant = Slot::Free { next: self.free };
        let Slot::Used(value) = std::mem::replace(&mut self.slots[slot as usize], vacant) else {
            panic!("slot {slot} is not in use");
        };
        self.free = slot;
        self.len -= 1;
        value
    }

    /// The value in a slot.
    pub fn get(&self, slot: u32) -> Option<&T> {
        match self.slots.get(slot as usize) {
            Some(Slot::Used(value)) => Some(value),
            _ => None,
        }
    }

    /// The value in a slot, mutable.
    pub fn get_mut(&mut self, slot: u32) -> Option<&mut T> {
        match self.slots.get_mut(slot as usize) {
            Some(Slot::Used(value)) => Some(value),
            _ => None,
        }
    }

    /// Number of values in the slab.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Number of values that the slab can hold; every slot number is smaller.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Whether the slab holds no value.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether there is no room for another value.
    pub fn is_full(&self) -> bool {
        self.free == NONE
    }

    /// All values with their slots.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.slots.iter().enumerate().filter_map(|(slot, s)| match s {
            Slot::Used(value) => Some((slot as u32, value)),
            Slot::Free { .. } => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_reused_and_never_shared() {
        let mut slab = Slab::new(3);
        let slots: Vec<u32> = (0..3).map(|v| slab.insert(v).expect("room")).collect();
        assert!(slab.is_full() && slab.insert(9).is_none());
        assert_eq!(slab.remove(slots[1]), 1);
        let again = slab.insert(7).expect("room");
        assert_eq!(again, slots[1]);
        assert_eq!(slab.iter().map(|(_, v)| *v).collect::<Vec<_>>(), [0, 7, 2]);
        assert_eq!(slab.len(), 3);
    }

    #[test]
    #[should_panic(expected = "not in use")]
    fn an_operation_that_completes_twice_is_noticed() {
        let mut slab = Slab::new(1);
        let slot = slab.insert(()).expect("room");
        slab.remove(slot);
        slab.remove(slot);
    }
}

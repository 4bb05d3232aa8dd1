//! Work in numbered pieces, done on several threads at once.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Does the pieces of a work from number 0 on, `jobs` at once. A thread stops when `piece` breaks.
pub(crate) fn at_once(jobs: usize, piece: &(dyn Fn(u64) -> ControlFlow<()> + Sync)) {
    let next = AtomicU64::new(0);
    let work = || while piece(next.fetch_add(1, Ordering::Relaxed)).is_continue() {};
    std::thread::scope(|scope| (0..jobs).for_each(|_| drop(scope.spawn(work))));
}

/// Takes a lock. A thread that has panicked with it has left nothing half done.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is behind a lock that nobody uses any more.
pub(crate) fn unlocked<T>(mutex: Mutex<T>) -> T {
    mutex.into_inner().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_piece_is_done_once_until_there_are_no_more() {
        let done = Mutex::new(Vec::new());
        at_once(3, &|n| {
            if n >= 20 {
                return ControlFlow::Break(());
            }
            lock(&done).push(n);
            ControlFlow::Continue(())
        });
        let mut done = unlocked(done);
        done.sort_unstable();
        assert_eq!(done, (0..20).collect::<Vec<_>>());
    }
}

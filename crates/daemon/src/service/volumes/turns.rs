//! One at a time of the same name.

use super::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

/// One lock of [`Turns`], held.
pub(super) type Turn = OwnedMutexGuard<()>;

/// Locks by name: what is called differently holds up nobody else.
#[derive(Default)]
pub(super) struct Turns(Mutex<BTreeMap<String, Arc<AsyncMutex<()>>>>);

impl Turns {
    /// The lock of this name, for as long as the caller keeps it.
    pub(super) async fn of(&self, name: &str) -> Turn {
        let one = {
            let mut all = lock(&self.0);
            // Nobody can get one again that is neither held nor waited for: that needs what is
            // locked here.
            all.retain(|_, one| Arc::strong_count(one) > 1);
            all.entry(name.to_owned()).or_default().clone()
        };
        one.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::timeout;

    #[tokio::test]
    async fn only_those_of_the_same_name_wait_and_none_stay() {
        let turns = Turns::default();
        let first = turns.of("a").await;
        let _other = turns.of("b").await;
        timeout(Duration::ZERO, turns.of("a")).await.expect_err("it is taken");
        assert_eq!(lock(&turns.0).len(), 2);
        drop(first);
        drop(turns.of("c").await);
        let known: Vec<_> = lock(&turns.0).keys().cloned().collect();
        assert_eq!(known, ["b", "c"]);
        timeout(Duration::ZERO, turns.of("a")).await.expect("it is free again");
    }
}

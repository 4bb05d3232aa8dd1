//! Brings images and caches into the state that a workload needs.

use std::time::Instant;

use serde_json::{Map, Value};

use super::measure::{PASS_LIMIT, PATIENCE};
use super::stand::Stand;
use super::watch::Watch;
use super::{RunError, Runner};
use crate::load::{Filled, Load};
use crate::placement::Arrangement;
use crate::suite::{Caches, Cell, Guest, Tool, Workload};
use crate::testbed::Testbed;
use tidepool_cluster::fio::{self, Pass, Running};

/// Most passes over a set that should become warm.
const WARM_PASSES_MAX: u32 = 8;
/// A set is warm if a pass misses less than this part of it. A miss on a slowed disk takes as long
/// as hundreds of hits.
const WARM_MISSES_MAX: f64 = 0.000_2;
/// Most runs of a load that let the caches settle before the load is measured.
const SETTLE_ROUNDS_MAX: u32 = 4;
/// Bytes of a block in the caches' counters of misses.
const CACHE_BLOCK_BYTES: f64 = 4096.0;

/// What caches are warm with: the sets of this number of clients and of neighbours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Warm {
    tool: Tool,
    /// Bytes of the set of each client.
    set_bytes: u64,
    clients: u32,
    neighbours: u32,
    /// The workload under which the caches settled, if it reads and writes. Running it leaves the
    /// caches as they are.
    workload: Option<String>,
}

impl Warm {
    /// What caches are warm with after a measurement of a cell has been prepared.
    fn with(cell: &Cell, workload: &Workload, neighbours: u32) -> Warm {
        let settles = workload.caches == Caches::Warm && workload.reads() && workload.writes();
        Warm {
            tool: workload.tool,
            set_bytes: workload.set_bytes,
            clients: cell.clients,
            neighbours,
            workload: settles.then(|| workload.name.clone()),
        }
    }

    /// Whether the caches settle under the workload itself.
    fn settles(&self) -> bool {
        self.workload.is_some()
    }
}

impl Runner<'_> {
    /// Brings the caches, and the data that clients will read, into the state that the workload
    /// needs. Devices answer at once meanwhile.
    pub(super) fn prepare(
        &self,
        stand: &mut Stand,
        cell: &Cell,
        workload: &Workload,
        arrangement: &Arrangement,
    ) -> Result<Filled, RunError> {
        let filled = self.fill(stand, cell, workload)?;
        let beside = self.suite.neighbours(cell).map_or(0, |neighbours| neighbours.count);
        stand.testbed.drain(0.0, &|| false).map_err(RunError::Placement)?;
        self.front_anew(stand, cell, workload, arrangement)?;
        let warm = Warm::with(cell, workload, beside);
        let settles = warm.settles();
        match workload.caches {
            Caches::Cold => {
                let front = arrangement.front().filter(|front| front.caches_reads());
                if let Some(front) = front {
                    stand.warm = None;
                    stand.testbed.front(Some(front)).map_err(RunError::Placement)?;
                }
            }
            Caches::Warm if stand.warm.as_ref() == Some(&warm) => {}
            Caches::Warm if arrangement.caches_reads() && !arrangement.caches_in_memory() => {
                self.warm_up(stand, cell, workload, warm)?;
            }
            Caches::Warm => {}
        }
        if workload.guest == Guest::Flushes {
            self.flush(stand, cell, workload, beside)?;
        }
        if workload.changes_caches() && !settles || beside > 0 {
            stand.warm = None;
        }
        self.interrupted()?;
        Ok(filled)
    }

    /// Writes the data that clients will read, unless it is there already.
    fn fill(
        &self,
        stand: &mut Stand,
        cell: &Cell,
        workload: &Workload,
    ) -> Result<Filled, RunError> {
        let filled = if self.options.unfilled {
            Filled::default()
        } else {
            let clients = self.clients(stand, cell, workload);
            let watch = Watch::new(self, &stand.testbed, PASS_LIMIT);
            clients.fill(&mut stand.objects, &|| watch.stop()).map_err(RunError::Load)?
        };
        if filled.anew {
            stand.warm = None;
        }
        Ok(filled)
    }

    /// Puts the placement in front of the cluster in place anew if what happened to it before would
    /// show in the measurement.
    fn front_anew(
        &self,
        stand: &mut Stand,
        cell: &Cell,
        workload: &Workload,
        arrangement: &Arrangement,
    ) -> Result<(), RunError> {
        // A placement in front of the cluster that was not as it should be in the measurement
        // before is put in place anew.
        if let Some(front) = arrangement.front().filter(|_| stand.testbed.holds().is_err()) {
            self.front(stand, Some(front))?;
        }
        // A cache does not forget that a guest has flushed. If it has seen a flush, it is put in
        // place anew for guests that never flush.
        if workload.guest == Guest::NeverFlushes
            && let Some(front) = arrangement.front()
        {
            let flushed = stand.testbed.flushed().map_err(RunError::Placement)?;
            if stand.mistaken(flushed, cell.clients, workload.guest).is_some() {
                self.front(stand, Some(front))?;
            }
        }
        Ok(())
    }

    /// Brings the sets of clients and neighbours into the caches, which are then `warm`.
    fn warm_up(
        &self,
        stand: &mut Stand,
        cell: &Cell,
        workload: &Workload,
        warm: Warm,
    ) -> Result<(), RunError> {
        let clients = self.clients(stand, cell, workload);
        stand.testbed.prepare(|| {
            // A cache that resists scans admits a block when it is read again.
            for _ in 0..2 {
                let set_bytes = self.neighbours_set_bytes(workload);
                let images = stand.of_neighbours(warm.neighbours).map(|image| (image, set_bytes));
                self.pass_over(&stand.testbed, Pass::Read, images)?;
            }
            (0..cell.clients)
                .try_for_each(|client| self.warm(&stand.testbed, clients.as_ref(), client))
        })?;
        if warm.settles() {
            self.settle(&stand.testbed, clients.as_ref(), workload)?;
        }
        // These blocks stay until other data is read or written.
        stand.warm = Some(warm);
        stand.testbed.drain(0.0, &|| false).map(drop).map_err(RunError::Placement)
    }

    /// Sends a flush from each client and from each of `beside` neighbours.
    fn flush(
        &self,
        stand: &Stand,
        cell: &Cell,
        workload: &Workload,
        beside: u32,
    ) -> Result<(), RunError> {
        let limit = Instant::now() + PATIENCE;
        let clients = self.clients(stand, cell, workload);
        clients.flush(&|| self.stop_reason(limit)).map_err(RunError::Load)?;
        for image in stand.of_neighbours(beside) {
            let words = fio::flush(&image);
            let flushed = Running::start(&image, &words);
            let flushed = flushed.and_then(|running| running.finish(&|| self.stop_reason(limit)));
            flushed.map_err(|e| RunError::Load(e.into()))?;
        }
        stand.testbed.drain(0.0, &|| false).map(drop).map_err(RunError::Placement)
    }

    /// Reads a client's set until a cache holds as much of it as it can.
    fn warm(&self, testbed: &Testbed, clients: &dyn Load, client: u32) -> Result<(), RunError> {
        let set_bytes = clients.set_bytes();
        let misses = || -> Result<f64, RunError> {
            let counters = testbed.counters().map_err(RunError::Placement)?;
            Ok(missed_blocks(&counters) * CACHE_BLOCK_BYTES)
        };
        // The second pass shows nothing: a cache that resists scans admits blocks then, and holds
        // them from the third pass on.
        until_warm(WARM_PASSES_MAX, 3, || {
            let before = misses()?;
            let watch = Watch::new(self, testbed, PASS_LIMIT);
            clients.pass(client, &|| watch.stop()).map_err(RunError::Load)?;
            Ok(Some((misses()? - before) / set_bytes as f64))
        })
    }

    /// Runs the measured load until a cache misses as little as it can, because writes take the
    /// place of cached blocks. SNIA's test specification calls that workload-dependent
    /// preconditioning.
    fn settle(
        &self,
        testbed: &Testbed,
        clients: &dyn Load,
        workload: &Workload,
    ) -> Result<(), RunError> {
        until_warm(SETTLE_ROUNDS_MAX, 2, || {
            let seen = self.load(testbed, clients, workload.block_bytes, Vec::new())?;
            self.interrupted()?;
            // A load that fails here fails in the measurement too, which reports the reason.
            Ok(seen.missed_per_request())
        })
    }
}

/// Repeats `once`, at most `most` times, until a cache misses next to nothing of a set. A set that
/// does not fit never gets there. Such a set is as warm as it can be when a round, from round
/// `told` on, misses more than 90 % of what the round before missed. `once` returns the part that
/// was missed, or `None` to stop.
fn until_warm(
    most: u32,
    told: u32,
    mut once: impl FnMut() -> Result<Option<f64>, RunError>,
) -> Result<(), RunError> {
    let mut last = f64::MAX;
    for time in 1..=most {
        let Some(missed) = once()? else { break };
        if missed < WARM_MISSES_MAX || time >= told && missed > last * 0.9 {
            break;
        }
        last = missed;
    }
    Ok(())
}

/// Blocks that caches missed, in total.
pub(super) fn missed_blocks(counters: &Map<String, Value>) -> f64 {
    counters.values().filter_map(|of| of["miss_blocks"].as_f64()).sum()
}

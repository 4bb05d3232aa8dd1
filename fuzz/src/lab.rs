//! The lab's documents: inventories, suites, results, journals, and records of another benchmark.

use tidepool_lab::cost::Prices;
use tidepool_lab::exchange::pvc2;
use tidepool_lab::plan::{Evidence, Inventory, plan};
use tidepool_lab::run::journal;
use tidepool_lab::suite::{CELLS_MAX, Suite};
use tidepool_lab::{compare, document, report, verdict};

/// The sample, whose mix and depth are those of a suite that comes with the program.
const INVENTORY: &str = include_str!("../../docs/examples/inventory.toml");

/// An inventory is refused or makes a plan, which can be told as JSON.
pub(crate) fn inventory(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match Inventory::parse(text) {
        Ok(inventory) => {
            let plan = plan(&inventory, &[]);
            serde_json::to_vec(&plan).expect("a plan is plain data");
        }
        Err(error) => assert!(error.at.is_none_or(|at| at <= text.len()), "byte {:?}", error.at),
    }
}

/// A suite is refused on one line, or has something to be measured, in both forms, and is itself
/// again when it is written and read.
pub(crate) fn suite(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let suite = match Suite::parse("s.toml", text) {
        Ok(suite) => suite,
        Err(error) => {
            let line = error.to_string();
            return assert!(!line.contains('\n'), "not one line: {line:?}");
        }
    };
    assert!(suite.cells().len() <= CELLS_MAX);
    for cell in suite.cells() {
        let workload = suite.workload(&cell.workload).expect("a workload of the suite");
        workload.job(cell.depth);
    }
    let json = serde_json::to_vec(&suite).expect("a suite is plain data");
    assert_eq!(serde_json::from_slice::<Suite>(&json).expect("as it was written"), suite);
    let quick = suite.clone().quick();
    assert!(quick.cells().len() <= suite.cells().len());
}

/// Results are refused on one line, or have a verdict, a report and a comparison, and a plan can
/// cite them.
pub(crate) fn results(bytes: &[u8]) {
    match document::parse("r.json", bytes) {
        Ok(results) => {
            let verdict = verdict::verdict(&results);
            let page = report::html(&results, &verdict, &Prices::default());
            assert!(page.starts_with("<!DOCTYPE html>"));
            compare::compare(&results, &results);
            let inventory = Inventory::parse(INVENTORY).expect("the sample");
            let evidence = [Evidence { file: "r.json".into(), results }];
            serde_json::to_vec(&plan(&inventory, &evidence)).expect("a plan is plain data");
        }
        Err(error) => {
            let line = error.to_string();
            assert!(!line.contains('\n'), "not one line: {line:?}");
        }
    }
}

/// Records of another benchmark are refused on one line, or have benchmarks whose figures are
/// numbers.
pub(crate) fn records(bytes: &[u8]) {
    match pvc2::parse("r.json", bytes) {
        Ok(found) => {
            assert!(!found.benchmarks.is_empty());
            for row in found.benchmarks.iter().flat_map(|benchmark| &benchmark.jobs) {
                let figures = [row.iops, row.bytes_per_s, row.mean_us];
                assert!(
                    figures.iter().all(|figure| figure.is_finite() && *figure >= 0.0),
                    "{row:?}"
                );
            }
        }
        Err(error) => {
            let line = error.to_string();
            assert!(!line.contains('\n'), "not one line: {line:?}");
        }
    }
}

/// A journal is refused, or what is whole of it says the same alone, and whatever a kill has left
/// behind that changes nothing.
pub(crate) fn journal(bytes: &[u8]) {
    let Some((results, good)) = journal::read(bytes) else { return };
    let whole = &bytes[..usize::try_from(good).expect("a part of the bytes")];
    assert_eq!(whole.last(), Some(&b'\n'));
    assert_eq!(journal::read(whole), Some((results.clone(), good)));
    assert_eq!(journal::read(&[whole, b"{\"run\":"].concat()), Some((results, good)));
}

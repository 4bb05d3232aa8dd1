//! The dry run of opening a file or device.

use super::owner::Located;
use super::{Caching, Image, check_located, transport};
use crate::api::OpenOptions;
use crate::report::{self, CheckReport, Seen};
use rustix::fs::FileType;
use std::path::Path;

/// Checks the image, its lock and its ownership record, and adds to the report what was found.
pub(crate) fn check(path: &Path, options: &OpenOptions, report: &mut CheckReport) {
    let size = |image: &Image| {
        let way = if image.direct {
            "O_DIRECT"
        } else {
            "the page cache (O_DIRECT is not possible there)"
        };
        format!("{} bytes, through {way}", image.size_bytes)
    };
    let Some(image) =
        report.step("image", Image::open(path, options.read_only, Caching::Direct), size)
    else {
        report.skip(&["lock", "ownership"], "the image cannot be opened");
        return;
    };
    let located = Located::of(path, &image.file, options.state_dir.as_deref());
    // Taken for a moment, and released below.
    let lock = image.lock(options.read_only).and_then(|()| match &located {
        Ok(located) => located.sidecar.check_lock(&image.what, options.read_only),
        Err(_) => Ok(Seen::Free),
    });
    report.lock(lock, "free");
    let read = located.and_then(|located| {
        located.check_recognised(&image.what, options)?;
        let continuity = check_located(&image.what, &located, &image.file, options)?;
        if !options.read_only {
            located.check_turn(options.state_dir.as_deref())?;
            located.sidecar.check_writable()?;
        }
        Ok((located, continuity))
    });
    image.unlock();
    let found =
        report.step("ownership", read, |(located, _)| report::describe(located.record.as_ref()));
    let Some((located, continuity)) = found else { return };
    if options.read_only {
        report.would.push("lock the image shared and only read it".into());
        return;
    }
    let generation =
        located.record.as_ref().map_or(1, |record| record.generation.saturating_add(1));
    if let Some(why) = located.forgets() {
        report.warn("identity", why);
    }
    if let Some(way) = shared_way(&image) {
        report.warn(
            "hosts",
            format!(
                "{} is reached over {way}, and other hosts may reach it, too: its lock and its record are of this host alone, so \
                 make sure that no other host uses it",
                located.name()
            ),
        );
    }
    if let Some(why) = image.open_to_others(path) {
        report.warn("access", why);
    }
    report.would.push("lock the image".into());
    report
        .would
        .push(format!("write generation {generation} to {}", located.sidecar.path().display()));
    report.would.push(continuity.plan());
}

/// How a device is reached, if other hosts may reach it in this way too. `None` for a file: its
/// record stands beside it, where every host that sees the file sees the record.
fn shared_way(image: &Image) -> Option<&'static str> {
    let stat = rustix::fs::fstat(&image.file).ok()?;
    let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    is_device.then(|| transport::may_be_shared(stat.st_rdev)).flatten()
}

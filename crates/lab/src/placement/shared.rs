//! Images that two hypervisors use over an access path on which each image is an NBD export. The
//! ownership record of an export is kept by one host; the record of a file is beside the file. So
//! each export is mounted as a file in a directory that both hypervisors use.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::daemon::{Daemon, Setup};
use super::mounted::Mounted;
use super::{Ground, PlacementError, failed};

/// The directory's name, in the ground's directory.
const DIRECTORY: &str = "shared";
/// Size in bytes of each file before an export is mounted in its place.
const FILE_BYTES: u64 = 1 << 20;
/// Size in bytes of the cache of the daemon that only makes the records: the smallest that Tidepool
/// accepts.
const CACHE_BYTES: u64 = 64 << 20;

/// The mounted files. Dropping it unmounts them.
#[derive(Debug)]
pub(super) struct Shared {
    directory: PathBuf,
    _files: Vec<Mounted>,
}

impl Shared {
    /// Makes and mounts the files; `None` where caches reach images by librbd.
    pub(super) fn of(ground: &Ground) -> Result<Option<Shared>, PlacementError> {
        if ground.uris.is_empty() {
            return Ok(None);
        }
        let directory = ground.directory.join(DIRECTORY);
        fs::create_dir_all(&directory)
            .map_err(failed(format!("cannot make {}", directory.display())))?;
        make_records(ground, &directory)?;
        let mount = |(image, uri): (&String, &String)| {
            let file = directory.join(image);
            let before = device(&file);
            Mounted::start(&file, &file, uri, || device(&file) != before)
        };
        let files = ground.uris.iter().map(mount).collect::<Result<_, _>>()?;
        Ok(Some(Shared { directory, _files: files }))
    }

    /// The URI of an image's file.
    pub(super) fn uri(&self, image: &str) -> String {
        uri(&self.directory, image)
    }

    /// The daemon's option that allows its peer to name these images.
    pub(super) fn option(&self) -> String {
        format!("--peer-images=file:{}", self.directory.display())
    }
}

fn uri(directory: &Path, image: &str) -> String {
    format!("file:{}", directory.join(image).display())
}

/// The device number of the filesystem that a file is on.
fn device(file: &Path) -> Option<u64> {
    fs::metadata(file).ok().map(|metadata| metadata.dev())
}

/// Makes the files, each with an ownership record beside it. Later each file is a mount point;
/// Tidepool serves such a file only if it has a record.
fn make_records(ground: &Ground, directory: &Path) -> Result<(), PlacementError> {
    let mut volumes = Vec::new();
    for image in ground.uris.keys() {
        let path = directory.join(image);
        if path.exists() {
            continue;
        }
        let made = File::create(&path).and_then(|file| file.set_len(FILE_BYTES));
        made.map_err(failed(format!("cannot make {}", path.display())))?;
        volumes.push((image.clone(), uri(directory, image)));
    }
    if volumes.is_empty() {
        return Ok(());
    }
    let setup = Setup {
        name: "records",
        directory: ground.directory.clone(),
        cache_bytes: CACHE_BYTES,
        volumes: &volumes,
        options: &[],
        namespace: None,
        state: Some(ground.directory.join("records.state")),
    };
    Daemon::start(ground, &setup)?.stop()
}

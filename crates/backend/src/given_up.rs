//! Notes on this host about cached data that was given up while its image was out of reach. A note
//! explains the image if it comes back.
//!
//! The image's record still says that its newest data is in the cache, although the data is gone.
//! Other caches are refused by the record alone. The cache itself, to which the image is new by
//! then, is refused by the note.

use crate::api::OpenOptions;
use crate::error::BackendError;
use crate::record::{OwnerState, Ownership, age, parse};
use crate::sidecar::{self, Sidecar};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use uuid::Uuid;

/// Version of this format.
const VERSION: u32 = 1;

/// A note: a cache has given up what it held of one image.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GivenUp {
    version: u32,
    /// Uuid of the cache device.
    cache_uuid: Uuid,
    /// Generation of the ownership, as the cache knew it.
    generation: u64,
    /// Name of the volume.
    volume: String,
    /// URI of its image.
    image: String,
    /// Bytes that were in the cache alone.
    bytes: u64,
    /// Age of the oldest of these bytes, in seconds.
    seconds: f64,
    /// When they were given up, in seconds since 1970.
    time_unix_s: u64,
}

impl GivenUp {
    /// A note with the present time: cache `cache_uuid` gives up what it holds of `volume`, whose
    /// image `image` it has as generation `generation`. `bytes` are in the cache alone, the oldest
    /// of them for `seconds`.
    pub fn new(
        cache_uuid: [u8; 16],
        generation: u64,
        (volume, image): (&str, &str),
        (bytes, seconds): (u64, f64),
    ) -> GivenUp {
        let time_unix_s =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        let (volume, image) = (volume.to_owned(), image.to_owned());
        let cache_uuid = Uuid::from_bytes(cache_uuid);
        GivenUp {
            version: VERSION,
            cache_uuid,
            generation,
            volume,
            image,
            bytes,
            seconds,
            time_unix_s,
        }
    }

    /// Writes the note to the directory of the ownership records of devices; `None` is
    /// `/var/lib/tidepool`. When this returns, the note is on stable media. Blocks.
    ///
    /// # Errors
    /// The note cannot be written.
    pub fn write(&self, state_dir: Option<&Path>) -> Result<(), BackendError> {
        let dir = sidecar::state_dir(state_dir);
        let path = dir.join(format!("{}{}.json", prefix(self.cache_uuid), Uuid::new_v4()));
        let mut json = serde_json::to_vec_pretty(self).expect("plain fields are serialisable");
        json.push(b'\n');
        let written = Sidecar::within(dir, "").replace(&path, &json);
        // A note is never replaced, so it needs no room for its next version.
        let _ = fs::remove_file(path.with_extension("json.new"));
        written.map_err(|e| match e.kind() {
            io::ErrorKind::PermissionDenied => BackendError::Denied {
                what: path.display().to_string(),
                why: "the note of what is given up cannot be written there; make its directory writable"
                    .into(),
            },
            _ => BackendError::io(path.display(), "write the note of what is given up", e),
        })
    }

    /// Whether the record is of the ownership whose data the note's cache has given up.
    fn is_of(&self, record: &Ownership) -> bool {
        let generation =
            record.generation == self.generation || record.base == Some(self.generation);
        record.cache_uuid == self.cache_uuid && record.state != OwnerState::Clean && generation
    }
}

fn prefix(cache_uuid: Uuid) -> String {
    format!("given-up-{cache_uuid}-")
}

/// The notes of the record's cache about the record's image.
fn of_record(
    record: &Ownership,
    state_dir: Option<&Path>,
) -> Result<Vec<(PathBuf, GivenUp)>, BackendError> {
    let mut found = Vec::new();
    for path in
        sidecar::files(sidecar::state_dir(state_dir), "list the notes of what was given up")?
    {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if !name.starts_with(&prefix(record.cache_uuid)) || !name.ends_with(".json") {
            continue;
        }
        let what = path.display().to_string();
        let bytes = fs::read(&path)
            .map_err(|e| BackendError::io(&what, "read the note of what was given up", e))?;
        let note: GivenUp = parse(&what, &bytes, VERSION)?;
        if note.is_of(record) {
            found.push((path, note));
        }
    }
    Ok(found)
}

/// Refuses an image whose newest data this cache has given up.
pub(crate) fn check(
    what: &str,
    record: &Ownership,
    options: &OpenOptions,
) -> Result<(), BackendError> {
    let is_new = options.generation.unwrap_or(0) == 0 && !options.recover;
    if !is_new || !record.is_by(options.cache_uuid) || record.state == OwnerState::Clean {
        return Ok(());
    }
    let Some((_, note)) = of_record(record, options.state_dir.as_deref())?.pop() else {
        return Ok(());
    };
    let GivenUp { volume, bytes, seconds, time_unix_s, .. } = &note;
    let why = format!(
        "this cache has given up {bytes} bytes that were written to it (volume {volume}, over {seconds:.0} s) while it was out of \
         reach, {} ago: what it holds is older; free it as it is: tidepool recover URI --accept-loss",
        age(*time_unix_s)
    );
    Err(BackendError::Unrecognised { what: what.into(), why })
}

/// Removes the notes about an image that is free now; `record` is its record before that.
pub(crate) fn forget(record: &Ownership, state_dir: Option<&Path>) {
    let forgotten = of_record(record, state_dir).and_then(|notes| {
        notes.into_iter().try_for_each(|(path, _)| {
            fs::remove_file(&path)
                .map_err(|e| BackendError::io(path.display(), "remove the note", e))
        })
    });
    if let Err(error) = forgotten {
        tracing::warn!("{error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_comes_back_is_explained_until_it_is_freed() {
        let dir = tempfile::tempdir().expect("a directory");
        let uuid = [3; 16];
        let as_new = OpenOptions {
            cache_uuid: uuid,
            state_dir: Some(dir.path().to_owned()),
            ..OpenOptions::default()
        };
        let record = Ownership::new(4, Uuid::from_bytes(uuid), OwnerState::Open);
        check("img", &record, &as_new).expect("nothing was given up");
        GivenUp::new(uuid, 4, ("vm1", "rbd:p/i"), (4096, 12.0))
            .write(Some(dir.path()))
            .expect("written");
        let told = check("img", &record, &as_new).expect_err("it was given up").to_string();
        assert!(
            told.contains("4096 bytes") && told.contains("vm1") && told.contains("recover"),
            "{told}"
        );
        // Attempts to open it that were cut short have raised the generation.
        let cut = Ownership { generation: 6, base: Some(4), ..record.clone() };
        assert!(check("img", &cut, &as_new).is_err());
        for other in [
            Ownership { generation: 3, ..record.clone() },
            Ownership { state: OwnerState::Clean, ..record.clone() },
            Ownership { cache_uuid: Uuid::nil(), ..record.clone() },
        ] {
            check("img", &other, &as_new).expect("another image");
        }
        check("img", &record, &OpenOptions { generation: Some(4), ..as_new.clone() })
            .expect("it is known");
        check("img", &record, &OpenOptions { recover: true, ..as_new.clone() })
            .expect("it is being freed");
        forget(&record, Some(dir.path()));
        check("img", &record, &as_new).expect("forgotten");
    }
}

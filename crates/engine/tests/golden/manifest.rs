//! A golden image and what is documented beside it.

use crate::content::{Holds, PACKED, Stretch, pack, unpack};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use tidepool_engine::api::{BLOCK_BYTES, DrainOrder, Mode, VolumeSpec};

/// What `NAME.json` tells of `NAME.gz.gz`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// What the cache went through, and what the image is there for.
    pub about: String,
    /// The version of the format that it was made with.
    pub format_version: u16,
    /// Bytes of the device; zeroes at its end are not packed.
    pub device_bytes: u64,
    /// What opening it finds.
    pub recovery: Recovery,
    pub volumes: Vec<Volume>,
}

/// What opening the image has to find, lest a part of it was passed over.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recovery {
    /// Records behind the newest checkpoint that count.
    pub records_replayed: u64,
    /// Records behind a torn one.
    pub records_cut: u64,
    pub blocks_lost: u64,
    pub volumes_failed: u64,
}

/// A volume of the image.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Volume {
    pub number: u16,
    pub name: String,
    pub backend: String,
    pub size_bytes: u64,
    /// `write-back`, `write-through`, `write-around` or `off`.
    pub mode: String,
    /// `grouped` or `unordered`.
    pub drain: String,
    pub dirty_bytes_max: u64,
    pub read_only: bool,
    pub generation: u64,
    /// In hexadecimal digits.
    pub attachment: String,
    /// So much is lost that nobody knows what: nothing of it is served.
    pub failed: bool,
    /// Number of the volume that it reads through, which no byte on the device tells.
    pub parent: Option<u16>,
    /// What its backend holds: `FIRST-LAST: CONTENT`, in blocks. Everything else is zero.
    pub image: Vec<Stretch>,
    /// What the cache holds above that: `FIRST-LAST: dirty|clean CONTENT`.
    pub cache: Vec<Stretch>,
    /// Dirty zeroes whose space the backend must keep; it need not know of others.
    pub kept: Vec<Stretch>,
}

impl Volume {
    /// Blocks, a last one that is only a part included.
    pub fn blocks(&self) -> u64 {
        self.size_bytes.div_ceil(BLOCK_BYTES as u64)
    }

    /// As it must be found.
    pub fn spec(&self) -> VolumeSpec {
        let digits = self.attachment.as_bytes().chunks(2);
        let byte = |digits: &[u8]| u8::from_str_radix(str::from_utf8(digits).expect("ASCII"), 16);
        VolumeSpec {
            name: self.name.clone(),
            backend: self.backend.clone(),
            size_bytes: self.size_bytes,
            mode: *MODES
                .iter()
                .find(|mode| mode.0 == self.mode)
                .map(|(_, mode)| mode)
                .expect("a mode"),
            drain: match self.drain.as_str() {
                "grouped" => DrainOrder::Grouped,
                "unordered" => DrainOrder::Unordered,
                other => panic!("there is no order {other}"),
            },
            dirty_bytes_max: self.dirty_bytes_max,
            read_only: self.read_only,
            generation: self.generation,
            attachment: digits.map(|digits| byte(digits).expect("hexadecimal digits")).collect(),
        }
    }

    /// What its backend held when the image was made.
    pub fn image(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.blocks() as usize * BLOCK_BYTES];
        for stretch in &self.image {
            for block in stretch.first..=stretch.last {
                bytes[block as usize * BLOCK_BYTES..][..BLOCK_BYTES]
                    .copy_from_slice(&stretch.holds.content(block));
            }
        }
        bytes.truncate(self.size_bytes as usize);
        bytes
    }

    /// What a client has to read: of each block its bytes, or nothing if it is lost.
    pub fn expected(&self) -> Vec<Option<Vec<u8>>> {
        let image = self.image();
        let mut blocks: Vec<_> =
            image.chunks(BLOCK_BYTES).map(|block| Some(block.to_vec())).collect();
        for stretch in &self.cache {
            for block in stretch.first..=stretch.last {
                let bytes = &mut blocks[block as usize];
                let len = bytes.as_ref().expect("a block is in one stretch").len();
                *bytes = (stretch.holds != Holds::Lost)
                    .then(|| stretch.holds.content(block)[..len].to_vec());
            }
        }
        blocks
    }
}

const MODES: [(&str, Mode); 4] = [
    ("write-back", Mode::WriteBack),
    ("write-through", Mode::WriteThrough),
    ("write-around", Mode::WriteAround),
    ("off", Mode::Off),
];

/// A mode's name in a manifest.
pub fn mode_name(mode: Mode) -> &'static str {
    MODES.iter().find(|(_, of)| *of == mode).expect("all modes are listed").0
}

/// A golden image.
pub struct Golden {
    /// Directory and name, for messages.
    pub name: String,
    pub manifest: Manifest,
    pub device: Vec<u8>,
}

/// Where the images of a version of the format are.
pub fn directory(version: u16) -> PathBuf {
    root().join(format!("v{version}"))
}

/// Where the images of all versions are.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

impl Golden {
    /// Reads an image and its manifest.
    pub fn read(version: u16, name: &str) -> Golden {
        let directory = directory(version);
        let text = fs::read_to_string(directory.join(format!("{name}.json"))).expect("a manifest");
        let name = format!("v{version}/{name}");
        let manifest: Manifest =
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        let device = unpack(&root().join(format!("{name}{PACKED}")), manifest.device_bytes);
        Golden { name, manifest, device }
    }

    /// Writes both files.
    pub fn write(&self) {
        let path = |ending| root().join(format!("{}{ending}", self.name));
        fs::create_dir_all(directory(self.manifest.format_version)).expect("a directory");
        pack(&self.device, &path(PACKED));
        let mut text = serde_json::to_string_pretty(&self.manifest).expect("plain data");
        text.push('\n');
        fs::write(path(".json"), text).expect("written");
    }
}

/// Whether an image exists already.
pub fn exists(version: u16, name: &str) -> bool {
    directory(version).join(format!("{name}{PACKED}")).exists()
}

//! An image on a file system that is full.

use crate::common::{Driver, OURS, open, options};
use std::ffi::CString;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Duration;
use tidepool_backend::{OpenOptions, Opened, OwnerState, Transfer};
use tidepool_engine::api::IoError;

const MIB: u64 = 1 << 20;

/// Runs the test with a file system of its own of so many bytes, which is gone with the thread.
/// Does not run the test where this user may not mount.
fn on_a_file_system(bytes: u64, test: impl FnOnce(&Path) + Send) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let mount = |source: &str, at: &Path, kind: &str, flags, data: &str| {
        let text = |text: &str| CString::new(text).expect("no zero byte");
        let (at, data) = (text(&at.to_string_lossy()), text(data));
        // SAFETY: C strings.
        unsafe {
            libc::mount(
                text(source).as_ptr(),
                at.as_ptr(),
                text(kind).as_ptr(),
                flags,
                data.as_ptr().cast(),
            )
        }
    };
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            // SAFETY: this thread alone gets another view of the file systems.
            if unsafe { libc::unshare(libc::CLONE_NEWNS | libc::CLONE_FS) } != 0 {
                return println!("not run: this user may not mount");
            }
            assert_eq!(mount("none", Path::new("/"), "", libc::MS_REC | libc::MS_PRIVATE, ""), 0);
            assert_eq!(mount("none", dir.path(), "tmpfs", 0, &format!("size={bytes}")), 0);
            test(dir.path());
        });
        run.join().expect("it passes");
    });
}

/// Fills the file system except for so many bytes.
fn fill(dir: &Path, leave_bytes: u64) {
    let free = rustix::fs::statvfs(dir).expect("a file system");
    let mut left = (free.f_bavail * free.f_frsize).saturating_sub(leave_bytes);
    let mut file =
        File::options().create(true).append(true).open(dir.join("ballast")).expect("a file");
    while left > 0 {
        let part = left.min(65536) as usize;
        // Only the file system knows where it is full.
        if file.write_all(&vec![7; part]).is_err() {
            return;
        }
        left -= part as u64;
    }
}

fn opened(image: &Path, dirty: bool) -> Opened {
    let how = OpenOptions { grouped: true, dirty, ..options(OURS) };
    open(&format!("file:{}", image.display()), how).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn g8_an_image_on_a_full_file_system_is_taken_back_and_given_back() {
    on_a_file_system(64 * MIB, |dir| {
        let image = dir.join("image");
        File::create(&image).expect("a file").set_len(256 * MIB).expect("a size");
        drop(opened(&image, false)); // Killed.
        fill(dir, 0);
        for dirty in [true, true, false] {
            let mut driver = Driver::new(opened(&image, dirty).backend);
            assert_eq!(driver.write(8 * MIB, &[1; 65536]), Err(IoError::Full));
            driver.close(!dirty).expect("given back");
        }
        let uri = format!("file:{}", image.display()).parse().expect("a URI");
        let record = tidepool_backend::ownership(&uri, None).expect("readable").expect("a record");
        assert_eq!((record.state, record.generation), (OwnerState::Clean, 4));
        fs::remove_file(dir.join("ballast")).expect("room");
        let mut driver = Driver::new(opened(&image, false).backend);
        driver.write(8 * MIB, &[1; 65536]).expect("there is room");
        driver.close(true).expect("given back");
    });
}

#[test]
fn g8_the_redo_leaves_the_last_room_to_the_image_that_it_is_about() {
    on_a_file_system(96 * MIB, |dir| {
        let image = dir.join("image");
        File::create(&image).expect("a file").set_len(256 * MIB).expect("a size");
        let mut driver = Driver::new(opened(&image, false).backend);
        fill(dir, 24 * MIB);
        let content = vec![3; 1 << 20];
        let mut written = 0;
        let full = loop {
            let token = driver.start_frame(1, written, &content);
            match driver.wait(token).0 {
                Ok(()) => written += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(full, IoError::Full);
        let free = rustix::fs::statvfs(dir).expect("a file system");
        let free_bytes = free.f_bavail * free.f_frsize;
        assert!(
            written > 4 && (16 * MIB..18 * MIB).contains(&free_bytes),
            "{written} frames, {free_bytes} bytes free"
        );
        let age = Duration::from_millis(1);
        let commit = Transfer::RedoCommit { first: 1, group: 1, frames: written, sequence: 1, age };
        driver.other(commit).expect("committed");
        for at in 0..8 {
            driver.write(at * MIB, &content).expect("the image has room for what is committed");
        }
        driver.close(false).expect("given back");
    });
}

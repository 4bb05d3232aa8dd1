//! Blocking access to the cache device in batches, for format, recovery and inspection.

use crate::CacheFile;
use io_uring::{IoUring, opcode, types::Fd};
use rustix::io::Errno;
use std::os::fd::AsRawFd;
use tidepool_engine::api::IoError;
use tidepool_engine::device::{Device, DeviceRead};

/// Most reads in flight at once: enough for an SSD to reach its full throughput.
const DEPTH: u32 = 64;

/// A cache device whose operations block the caller.
pub struct BlockingDevice<'a> {
    cache: &'a CacheFile,
    /// `None` where io_uring cannot be used: reads then run one after the other.
    ring: Option<IoUring>,
}

impl CacheFile {
    /// Blocking access to this cache.
    pub fn blocking(&self) -> BlockingDevice<'_> {
        BlockingDevice { cache: self, ring: IoUring::new(DEPTH).ok() }
    }
}

fn errno(error: Errno) -> IoError {
    match error {
        Errno::NOSPC | Errno::DQUOT => IoError::Full,
        other => IoError::Errno(other.raw_os_error()),
    }
}

impl BlockingDevice<'_> {
    /// Reads the rest of `buf` behind its first `done` bytes.
    fn finish_read(&self, offset: u64, buf: &mut [u8], mut done: usize) -> Result<(), IoError> {
        while done < buf.len() {
            match rustix::io::pread(self.cache.fd(), &mut buf[done..], offset + done as u64) {
                Ok(0) => return Err(IoError::Errno(libc::EIO)),
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(e) => return Err(errno(e)),
            }
        }
        Ok(())
    }

    /// Runs one batch through the ring. Each read is submitted once, and its completion is awaited
    /// once.
    fn read_at_once(&self, ring: &mut IoUring, batch: &mut [DeviceRead<'_>]) {
        assert!(batch.len() <= DEPTH as usize);
        let fd = Fd(self.cache.fd().as_raw_fd());
        for (index, read) in batch.iter_mut().enumerate() {
            let entry = opcode::Read::new(fd, read.buf.as_mut_ptr(), read.buf.len() as u32)
                .offset(read.offset)
                .build()
                .user_data(index as u64);
            // SAFETY: the buffers are borrowed exclusively until this function returns, and this
            // function returns only when every read has completed.
            unsafe { ring.submission().push(&entry) }
                .expect("the ring is as deep as a batch is long");
        }
        let mut left = batch.len();
        while left > 0 {
            if let Err(error) = ring.submit_and_wait(left) {
                let passing = [libc::EINTR, libc::EAGAIN, libc::EBUSY];
                let known = error.raw_os_error().is_some_and(|e| passing.contains(&e));
                // Reads are in flight: a return would release buffers to which the kernel still
                // writes.
                assert!(known, "io_uring cannot be entered any more: {error}");
            }
            for done in ring.completion() {
                left -= 1;
                let read = &mut batch[done.user_data() as usize];
                read.result = match done.result() {
                    result if result < 0 => Err(errno(Errno::from_raw_os_error(-result))),
                    result => self.finish_read(read.offset, read.buf, result as usize),
                };
            }
        }
    }
}

impl Device for BlockingDevice<'_> {
    fn size_bytes(&self) -> u64 {
        self.cache.len_bytes()
    }

    fn read(&mut self, batch: &mut [DeviceRead<'_>]) {
        match self.ring.take() {
            Some(mut ring) => {
                for part in batch.chunks_mut(DEPTH as usize) {
                    self.read_at_once(&mut ring, part);
                }
                self.ring = Some(ring);
            }
            None => {
                for read in batch {
                    read.result = self.finish_read(read.offset, read.buf, 0);
                }
            }
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), IoError> {
        let mut done = 0;
        while done < data.len() {
            match rustix::io::pwrite(self.cache.fd(), &data[done..], offset + done as u64) {
                Ok(0) => return Err(IoError::Errno(libc::EIO)),
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(e) => return Err(errno(e)),
            }
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<(), IoError> {
        // A failed sync is not repeated: a second call could report success although the data was
        // never written.
        rustix::fs::fdatasync(self.cache.fd()).map_err(errno)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CACHE_BYTES_MIN;
    use tidepool_engine::mem::AlignedBuf;

    fn read_back(
        device: &mut BlockingDevice<'_>,
        offsets: &[u64],
    ) -> Vec<(u8, Result<(), IoError>)> {
        let mut bufs: Vec<AlignedBuf> = offsets.iter().map(|_| AlignedBuf::zeroed(4096)).collect();
        let mut batch: Vec<DeviceRead<'_>> = offsets
            .iter()
            .zip(&mut bufs)
            .map(|(offset, buf)| DeviceRead { offset: *offset, buf, result: Ok(()) })
            .collect();
        device.read(&mut batch);
        let results: Vec<_> = batch.iter().map(|r| r.result).collect();
        bufs.iter().map(|b| b[17]).zip(results).collect()
    }

    #[test]
    fn a_batch_larger_than_the_ring_reads_each_block_where_it_belongs() {
        let dir = tempfile::tempdir().expect("a directory");
        let cache = CacheFile::create(&dir.path().join("cache"), CACHE_BYTES_MIN).expect("room");
        let mut device = cache.blocking();
        let mut block = AlignedBuf::zeroed(4096);
        for n in 0..200u64 {
            block.fill(n as u8);
            device.write(n * 4096, &block).expect("written");
        }
        device.sync().expect("synced");
        let offsets: Vec<u64> = (0..200).rev().map(|n| n * 4096).collect();
        for ring in [true, false] {
            if !ring {
                device.ring = None;
            }
            for (n, (byte, result)) in read_back(&mut device, &offsets).into_iter().enumerate() {
                assert_eq!((byte, result), (199 - n as u8, Ok(())));
            }
        }
    }

    #[test]
    fn a_read_past_the_end_fails_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let cache = CacheFile::create(&dir.path().join("cache"), CACHE_BYTES_MIN).expect("room");
        let mut device = cache.blocking();
        let results = read_back(&mut device, &[0, CACHE_BYTES_MIN, 4096]);
        assert_eq!(results[0].1, Ok(()));
        assert_eq!(results[1].1, Err(IoError::Errno(libc::EIO)));
        assert_eq!(results[2].1, Ok(()));
    }
}

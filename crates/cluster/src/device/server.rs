//! The FUSE server of an emulated device: the files on the device, and the device's commands for
//! the kernel's requests.

use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request,
    TimeOrNow, WriteFlags,
};
use rustix::fs::FallocateFlags;

use super::emulated::{Answer, FLUSH, Shared};
use super::faults::{Fate, Operation, Ticket};
use super::files::{Extent, Files, Refused};
use super::model::{Command, Kind};

/// How long the kernel may keep a file's attributes: long, because all changes go through the
/// kernel.
const TTL: Duration = Duration::from_secs(86_400);
/// Largest transfer of one command, in bytes.
const TRANSFER_BYTES_MAX: u32 = 1 << 20;
/// Requests that the kernel sends before it waits for answers: more than any measured queue depth.
const IN_FLIGHT_MAX: u16 = 512;
/// Unit of a file's number of blocks, in bytes.
const SECTOR_BYTES: u64 = 512;
/// Unit of space in the output of `df`, in bytes.
const BLOCK_BYTES: u64 = 4096;
/// Longest name of a file, in bytes.
const NAME_BYTES_MAX: u32 = 255;
/// The kernel caches nothing of a device, and writes to a file go in parallel.
const OPENED: FopenFlags =
    FopenFlags::FOPEN_DIRECT_IO.union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);

/// The FUSE server of a device.
#[derive(Debug)]
pub(super) struct Server(pub(super) Arc<Shared>);

impl From<Refused> for Errno {
    fn from(refused: Refused) -> Errno {
        match refused {
            Refused::Missing => Errno::ENOENT,
            Refused::Exists => Errno::EEXIST,
            Refused::Full => Errno::ENOSPC,
        }
    }
}

impl Server {
    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let (kind, perm, size) = match self.0.files().bytes(inode.0) {
            Some(bytes) => (FileType::RegularFile, 0o600, bytes),
            None if inode == INodeNo::ROOT => (FileType::Directory, 0o700, 0),
            None => return None,
        };
        Some(FileAttr {
            ino: inode,
            size,
            blocks: size / SECTOR_BYTES,
            atime: SystemTime::UNIX_EPOCH,
            mtime: SystemTime::UNIX_EPOCH,
            ctime: SystemTime::UNIX_EPOCH,
            crtime: SystemTime::UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            rdev: 0,
            blksize: BLOCK_BYTES as u32,
            flags: 0,
        })
    }

    /// Makes space that files have given back read as zeroes when it is used again.
    fn clear(&self, freed: Vec<(u64, u64)>) -> io::Result<()> {
        self.0.faults.clear(&self.0.data, &freed)?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for (offset, len) in freed {
            rustix::fs::fallocate(&self.0.data, flags, offset, len)?;
        }
        Ok(())
    }

    /// Answers a change of the directory, which takes none of the device's simulated time.
    fn change(&self, done: Result<Vec<(u64, u64)>, Refused>, reply: ReplyEmpty) {
        match done.map_err(Errno::from).and_then(|freed| self.clear(freed).map_err(Errno::from)) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    /// The command for a transfer. A transfer to several places is one command at the first of
    /// these places.
    fn command(kind: Kind, extents: &[Extent]) -> Option<Command> {
        let offset = extents.iter().find_map(|(place, _)| *place)?;
        let on_device = extents.iter().filter(|(place, _)| place.is_some());
        Some(Command { kind, offset, len: on_device.map(|(_, len)| len).sum() })
    }

    /// What becomes of an operation. `Faults::begin` gives the operation its number.
    fn begin(
        &self,
        kind: Kind,
        inode: INodeNo,
        (offset, len): (u64, u64),
        data: &[u8],
        durable: bool,
    ) -> Fate {
        let faults = &self.0.faults;
        if !faults.is_active() {
            return Fate::PASS;
        }
        let file = self.0.files().name(inode.0).unwrap_or_default().to_string();
        faults.begin(Operation { kind, number: 0, file: &file, offset, len, data, durable })
    }

    /// Flushes the whole device: the flush of any one file is a flush of the whole device.
    fn flush_device(&self, inode: INodeNo, reply: ReplyEmpty) {
        let fate = self.begin(Kind::Flush, inode, (0, 0), &[], false);
        let ticket = self.0.faults.flush(fate);
        match self.0.faults.passes(fate) {
            true => self.0.submit(FLUSH, Answer::Empty(reply), ticket),
            false => reply.error(Errno::EIO),
        }
    }

    fn with_files<T>(
        &self,
        name: &OsStr,
        with: impl FnOnce(&mut Files, &str) -> Result<T, Refused>,
    ) -> Result<T, Refused> {
        let name = name.to_str().ok_or(Refused::Missing)?;
        with(&mut self.0.files(), name)
    }
}

impl Filesystem for Server {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // A capability that an older kernel lacks is left out. Then fewer commands are in flight.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        let _ = config.set_max_write(TRANSFER_BYTES_MAX);
        let _ = config.set_max_background(IN_FLIGHT_MAX);
        let _ = config.set_congestion_threshold(IN_FLIGHT_MAX);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.with_files(name, |files, name| files.find(name).ok_or(Refused::Missing));
        let inode = found.ok().filter(|_| parent == INodeNo::ROOT).map(INodeNo);
        match inode.and_then(|inode| self.attributes(inode)) {
            Some(attributes) => reply.entry(&TTL, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        _file: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        match self.attributes(inode) {
            Some(attributes) => reply.attr(&TTL, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn setattr(
        &self,
        _request: &Request,
        inode: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _file: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if !self.0.faults.is_up() {
            return reply.error(Errno::EIO);
        }
        let resized = size.map_or(Ok(Vec::new()), |size| self.0.files().resize(inode.0, size));
        let cleared =
            resized.map_err(Errno::from).and_then(|freed| self.clear(freed).map_err(Errno::from));
        match (cleared, self.attributes(inode)) {
            (Ok(()), Some(attributes)) => reply.attr(&TTL, &attributes),
            (Ok(()), None) => reply.error(Errno::ENOENT),
            (Err(error), _) => reply.error(error),
        }
    }

    fn create(
        &self,
        _request: &Request,
        _parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        if !self.0.faults.is_up() {
            return reply.error(Errno::EIO);
        }
        let made = self.with_files(name, |files, name| {
            let inode = files.create(name)?;
            files.opened(inode);
            Ok(inode)
        });
        match made.map(|inode| self.attributes(INodeNo(inode))) {
            Ok(Some(attributes)) => {
                reply.created(&TTL, &attributes, Generation(0), FileHandle(0), OPENED)
            }
            Ok(None) => reply.error(Errno::ENOENT),
            Err(refused) => reply.error(refused.into()),
        }
    }

    fn unlink(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        if !self.0.faults.is_up() {
            return reply.error(Errno::EIO);
        }
        self.change(self.with_files(name, |files, name| files.unlink(name)), reply);
    }

    fn rename(
        &self,
        _request: &Request,
        _parent: INodeNo,
        name: &OsStr,
        _new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        if !flags.is_empty() {
            return reply.error(Errno::EINVAL);
        }
        if !self.0.faults.is_up() {
            return reply.error(Errno::EIO);
        }
        let to = new_name.to_str().ok_or(Refused::Missing);
        let renamed = to.and_then(|to| self.with_files(name, |files, from| files.rename(from, to)));
        self.change(renamed, reply);
    }

    fn readdir(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _file: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        for (at, (name, inode)) in
            self.0.files().names().into_iter().enumerate().skip(offset as usize)
        {
            // The offset is that of the next entry.
            if reply.add(INodeNo(inode), at as u64 + 1, FileType::RegularFile, name) {
                break;
            }
        }
        reply.ok();
    }

    fn open(&self, _request: &Request, inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.0.files().opened(inode.0);
        reply.opened(FileHandle(0), OPENED);
    }

    fn release(
        &self,
        _request: &Request,
        inode: INodeNo,
        _file: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let freed = self.0.files().closed(inode.0);
        self.change(Ok(freed), reply);
    }

    fn read(
        &self,
        _request: &Request,
        inode: INodeNo,
        _file: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let fate = self.begin(Kind::Read, inode, (offset, u64::from(size)), &[], false);
        if !self.0.faults.passes(fate) {
            return reply.error(Errno::EIO);
        }
        let extents = self.0.files().extents(inode.0, offset, u64::from(size));
        let mut data = vec![0; extents.iter().map(|(_, len)| *len as usize).sum()];
        let mut rest = &mut data[..];
        for &(place, len) in &extents {
            let (part, after) = rest.split_at_mut(len as usize);
            if let Some(Err(error)) = place.map(|place| self.0.data.read_exact_at(part, place)) {
                return reply.error(error.into());
            }
            rest = after;
        }
        match Server::command(Kind::Read, &extents) {
            Some(command) => self.0.submit(command, Answer::Read(reply, data), Ticket::None),
            // A range without a place is zeroes, and needs no access to the device.
            None => reply.data(&data),
        }
    }

    fn write(
        &self,
        _request: &Request,
        inode: INodeNo,
        _file: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        // The kernel adds the flags of a single write to those with which the file was opened.
        let durable = flags.0 & libc::O_DSYNC != 0;
        let fate = self.begin(Kind::Write, inode, (offset, data.len() as u64), data, durable);
        let extents = {
            let mut files = self.0.files();
            if let Err(refused) = files.reserve(inode.0, offset, data.len() as u64) {
                return reply.error(refused.into());
            }
            files.extents(inode.0, offset, data.len() as u64)
        };
        let ticket = match self.0.faults.write(&self.0.data, &extents, data, durable, fate) {
            Ok(ticket) => ticket,
            Err(error) => return reply.error(error.into()),
        };
        if !self.0.faults.passes(fate) {
            return reply.error(Errno::EIO);
        }
        let len = data.len() as u32;
        let Some(command) = Server::command(Kind::Write, &extents) else {
            return reply.written(len);
        };
        let answer = if durable { Answer::Durable(reply, len) } else { Answer::Write(reply, len) };
        self.0.submit(command, answer, ticket);
    }

    fn fsync(
        &self,
        _request: &Request,
        inode: INodeNo,
        _file: FileHandle,
        _data: bool,
        reply: ReplyEmpty,
    ) {
        self.flush_device(inode, reply);
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        inode: INodeNo,
        _file: FileHandle,
        _data: bool,
        reply: ReplyEmpty,
    ) {
        self.flush_device(inode, reply);
    }

    /// Called when a file is closed. Nothing has to be on the media for that.
    fn flush(
        &self,
        _request: &Request,
        _inode: INodeNo,
        _file: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn statfs(&self, _request: &Request, _inode: INodeNo, reply: ReplyStatfs) {
        let files = self.0.files();
        let all = files.bytes(files.find(&Files::part_name(0)).unwrap_or_default()).unwrap_or(0);
        let (blocks, free) = (all / BLOCK_BYTES, files.free_bytes() / BLOCK_BYTES);
        reply.statfs(
            blocks,
            free,
            free,
            0,
            0,
            BLOCK_BYTES as u32,
            NAME_BYTES_MAX,
            BLOCK_BYTES as u32,
        );
    }

    fn fallocate(
        &self,
        _request: &Request,
        inode: INodeNo,
        _file: FileHandle,
        offset: u64,
        len: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let flags = FallocateFlags::from_bits_truncate(mode.cast_unsigned());
        if !flags.intersects(FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE) {
            if !self.0.faults.is_up() {
                return reply.error(Errno::EIO);
            }
            let mut files = self.0.files();
            let reserved = match flags.contains(FallocateFlags::KEEP_SIZE) {
                true => files.reserve_only(inode.0, offset, len),
                false => files.reserve(inode.0, offset, len),
            };
            drop(files);
            return self.change(reserved.map(|()| Vec::new()), reply);
        }
        let fate = self.begin(Kind::Trim, inode, (offset, len), &[], false);
        let extents = self.0.files().extents(inode.0, offset, len);
        let places = extents.iter().filter_map(|&(place, len)| Some((place?, len)));
        let cleared = if fate.clears() { self.clear(places.collect()) } else { Ok(()) };
        if !self.0.faults.passes(fate) {
            return reply.error(Errno::EIO);
        }
        match (cleared, Server::command(Kind::Trim, &extents)) {
            (Ok(()), Some(command)) => self.0.submit(command, Answer::Empty(reply), Ticket::None),
            (Ok(()), None) => reply.ok(),
            (Err(error), _) => reply.error(error.into()),
        }
    }
}

//! Writes the archive that the kernel unpacks as its first root ("newc" format).

use std::io::{self, Write};

/// File type and permission bits of a directory.
const DIRECTORY: u32 = 0o040_755;
/// File type and permission bits of an executable file.
const FILE: u32 = 0o100_755;
/// File type and permission bits of a character device.
const DEVICE: u32 = 0o020_600;

/// An archive under construction. Parents of an entry are made when they are first needed.
#[derive(Debug)]
pub struct Archive<W> {
    output: W,
    made: std::collections::BTreeSet<String>,
    written: usize,
    inode: u32,
}

impl<W: Write> Archive<W> {
    /// An empty archive.
    pub fn new(output: W) -> Archive<W> {
        Archive { output, made: Default::default(), written: 0, inode: 0 }
    }

    /// A directory; `path` is absolute, as for every entry.
    pub fn directory(&mut self, path: &str) -> io::Result<()> {
        let path = path.trim_matches('/');
        if path.is_empty() || !self.made.insert(path.to_string()) {
            return Ok(());
        }
        self.parents(path)?;
        self.entry(path, DIRECTORY, (0, 0), &[])
    }

    /// An executable file.
    pub fn file(&mut self, path: &str, content: &[u8]) -> io::Result<()> {
        self.parents(path)?;
        self.entry(path, FILE, (0, 0), content)
    }

    /// A character device.
    pub fn device(&mut self, path: &str, major: u32, minor: u32) -> io::Result<()> {
        self.parents(path)?;
        self.entry(path, DEVICE, (major, minor), &[])
    }

    /// Ends the archive.
    pub fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.output.flush()?;
        Ok(self.output)
    }

    fn parents(&mut self, path: &str) -> io::Result<()> {
        match path.trim_matches('/').rsplit_once('/') {
            Some((parent, _)) => self.directory(parent),
            None => Ok(()),
        }
    }

    fn entry(
        &mut self,
        path: &str,
        mode: u32,
        device: (u32, u32),
        content: &[u8],
    ) -> io::Result<()> {
        let name = path.trim_matches('/');
        let length = u32::try_from(content.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
        self.inode += 1;
        // Inode, mode, user, group, links, time, size, device, the node's device, length of the
        // name, unused sum.
        let fields = [
            self.inode,
            mode,
            0,
            0,
            1,
            0,
            length,
            0,
            0,
            device.0,
            device.1,
            name.len() as u32 + 1,
            0,
        ];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08x}"));
        }
        self.put(header.as_bytes())?;
        self.put(name.as_bytes())?;
        self.put(&[0])?;
        self.pad()?;
        self.put(content)?;
        self.pad()
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len();
        self.output.write_all(bytes)
    }

    fn pad(&mut self) -> io::Result<()> {
        let padding = self.written.next_multiple_of(4) - self.written;
        self.put(&[0; 3][..padding])
    }
}

//! The vectors of a send or a receive in flight.

/// A message header with its vectors. They stay where they are: the kernel reads them.
pub(in crate::shard) struct Message<const N: usize> {
    pub(in crate::shard) header: libc::msghdr,
    pub(in crate::shard) vectors: [libc::iovec; N],
}

// SAFETY: the pointers are only used by the kernel, for the thread that owns the message.
unsafe impl<const N: usize> Send for Message<N> {}

impl<const N: usize> Message<N> {
    pub(in crate::shard) fn new() -> Box<Message<N>> {
        let no_vector = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: a message header of zeroes is a valid one without vectors.
        let header = unsafe { std::mem::zeroed() };
        Box::new(Message { header, vectors: [no_vector; N] })
    }

    /// The header with the first `used` vectors.
    pub(in crate::shard) fn of(&mut self, used: usize) -> *mut libc::msghdr {
        self.header.msg_iov = self.vectors.as_mut_ptr();
        self.header.msg_iovlen = used;
        &mut self.header
    }
}

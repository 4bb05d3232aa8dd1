//! The second copy of a volume at another host (RFC 9): the owner's side, the follower's, and what each gets from the other.

pub(crate) mod fetch;
pub(crate) mod follower;
pub(crate) mod owner;
pub(crate) mod repair;

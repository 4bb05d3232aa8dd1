//! Deliberate bugs, for the test of those who look for bugs: each check of this core must notice
//! them.
//!
//! They exist with the feature `mutations` only, which no program that is given to users has. Each
//! is off until [`set`] puts it in force in the calling thread. In the code, `mutated!(Name)` is
//! true where the bug is to be.

/// Whether the deliberate bug is in force; without the feature `mutations` it never is.
macro_rules! mutated {
    ($name:ident) => {{
        #[cfg(feature = "mutations")]
        let mutated = crate::base::mutation::is(crate::base::mutation::Mutation::$name);
        #[cfg(not(feature = "mutations"))]
        let mutated = false;
        mutated
    }};
}
pub(crate) use mutated;

#[cfg(feature = "mutations")]
pub use list::{Mutation, is, set};

#[cfg(feature = "mutations")]
mod list {
    use std::cell::Cell;

    macro_rules! mutations {
        ($($name:ident: $what:literal,)* ; $($pair:ident: $of_pair:literal,)* ; $($probe:ident: $of_probe:literal,)*) => {
            /// A deliberate bug.
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            pub enum Mutation {
                $(#[doc = $what] $name,)*
                $(#[doc = $of_pair] $pair,)*
                $(#[doc = $of_probe] $probe,)*
            }

            impl Mutation {
                /// All bugs.
                pub const ALL: &[Mutation] = &[$(Mutation::$name,)* $(Mutation::$pair,)*];

                /// What is wrong with it, in a few words.
                pub fn what(self) -> &'static str {
                    match self {
                        $(Mutation::$name => $what,)*
                        $(Mutation::$pair => $of_pair,)*
                        $(Mutation::$probe => $of_probe,)*
                    }
                }

                /// It is about a second copy.
                pub fn needs_two_hosts(self) -> bool {
                    matches!(self, $(Mutation::$pair)|*)
                }
            }
        };
    }

    mutations! {
        SkipReadCrc: "a cached block is not verified when it is read",
        SkipDrainCrc: "a block is not verified before it is drained",
        SkipReplayCrc: "the blocks of a record are not verified at replay",
        ReplayPastTornRecord: "replay goes on behind a torn record",
        AckBeforeWritten: "a write is acknowledged when the append before its own is written",
        FuaCoversWhatIsBefore: "a write with FUA is taken for stable together with all before it",
        FlushWithoutSync: "a flush is answered without a sync",
        FailedSyncCounts: "a sync that failed counts as done",
        UnsafeUntilFlush: "writes before a client's first flush do not wait for stable media",
        WriteKeepsFills: "a write does not cancel the fills of its blocks",
        DiscardKeepsFills: "a discard does not cancel the fills of its blocks",
        CoalesceAcrossCut: "a frame takes the newest content of its blocks, not that of its group",
        RedoWithoutHeader: "a group counts as committed without a change of the redo's header",
        TrimBeforeApplied: "the redo is trimmed before the image has what it holds",
        CleanBeforeFlush: "a drained block is clean before the backend has flushed",
        ZeroesStayInTheCache: "zeroes are not drained",
        DrainedOneTooFar: "the first record that is not drained counts as drained",
        SegmentReusedEarly: "a segment is reused before a checkpoint that does not name it is durable",
        MovedBlockIsClean: "a dirty block that reclaim has moved counts as clean",
        GhostKnowsEverything: "the ghost takes every block for one that was evicted",
        CleanKeptWithoutProof: "clean blocks are kept although the image may have been written by others",
        HeaderBeforePages: "a checkpoint's header is written before its pages are stable",
        CrossingRunQueuedOnce: "data that reaches into the next object queues only the first for the drain",
        SyncCoversIssued: "a sync counts for appends that were still in flight when it began",
        DirectBesideRedo: "a change goes past the cache while a redo is kept",
        MovedWhileDrained: "a dirty block that is moved while its object is drained is not queued again",
        NewZeroesTakenForDrained: "a discard during the drain of its object's zeroes is taken for drained",
        RequeuedAsNewer: "an object that comes back from the drain counts as dirty since a newer change only",
        FailedFrameKeepsBuffer: "a frame that has to be made again keeps its buffer",
        CheckpointCoversLater: "a durable checkpoint counts for what was published after it began",
        CleaningNotNoted: "a block that becomes clean changes no page of the next checkpoint",
        FirstNewSegmentForgotten: "the first segment that was opened after a checkpoint is not found at a start",
        RestartForgetsFailure: "a replay that finds nothing wrong makes a failed volume good",
        AttachedWithoutGroups: "a volume attached in write-through drains what is dirty without groups",
        ShrinkMissesStraddler: "a volume becomes smaller while requests reach over its new end",
        SnapshotUnderWrites: "the drain goes on while the backend takes a snapshot",
        LinkForgetsWritten: "what a clone's image got before it was linked to its parent is not its own",
        DisownedWhileDirty: "an image no longer names a dead cache device that has newer data for it",
        TruncateKeepsFlags: "objects beyond the new end of a volume stay marked as queued",
        ; // Of two hosts.
        AckBeforePeer: "a change is acknowledged before the peer has it",
        PeersStableIgnored: "a flush is answered when the peer has everything, stable or not",
        DrainBeforePeer: "the image gets what the peer does not have on stable media",
        PeerNotTold: "a change past the cache is not logged where the owner holds nothing of it",
        RoomIgnored: "the owner sends more than the peer has room for",
        DisownedWhilePaired: "an image no longer names a dead cache device while its record names a second copy",
        DetachedInFlight: "a volume lets go of its backend with writes on their way there",
        FailedLogCounts: "an owner whose cache device had failed serves what it has come back with",
        CleanOneTooFar: "what came one record after the owner's image counts as clean in a replica",
        SoloBeforeStable: "the record says that an owner is alone before its own log is stable",
        RestartedCopyTakesOver: "a copy takes over although its host has lost its power",
        TailNotAsked: "an owner that lost its power comes back without asking its peer",
        OutcomeIgnored: "a change of the record counts as made whatever stands there",
        LastRecordNotFetched: "an owner that lost its power gets all but the last of the records that its peer has",
        BlockNotGiven: "a peer says that it has no good copy of a block",
        LeaseForgotten: "an owner takes reads however long its peer has not followed it",
        ServesAtOnce: "a host that takes a volume over does not wait until its former owner takes no more reads",
        LossForgotten: "an owner tells its peer how far the image is as if nothing had been lost",
        ; // No bugs, or none that a guarantee forbids: they try the comparison of two builds.
        OtherTokens: "effects have other tokens",
        RepliesLast: "replies come behind the other effects of their instant",
        CutTimeForgotten: "a redo's header says 0 for the time of its cut",
        CounterDead: "the bytes that clients read are not counted",
    }

    thread_local! {
        static IN_FORCE: Cell<Option<Mutation>> = const { Cell::new(None) };
    }

    /// Puts a deliberate bug in force in this thread, or none.
    pub fn set(mutation: Option<Mutation>) {
        IN_FORCE.set(mutation);
    }

    /// Whether it is in force.
    pub fn is(mutation: Mutation) -> bool {
        IN_FORCE.get() == Some(mutation)
    }
}

//! One volume, as all rooms know it: what is true of it, where its blocks are, and how far its log
//! and its drain are.

mod asked;
mod image;
mod item;

use crate::api::{
    BLOCK_BYTES, BackendOp, Begin, ControlError, Degraded, DrainOrder, Mode, Pairing, VolumeId,
    VolumeSpec,
};
use crate::backend::Backend;
use crate::base::flight::OpId;
use crate::base::mutation::mutated;
use crate::base::progress::{Backlog, Progress};
use crate::blocks::budget::Reserve;
use crate::blocks::ledger::Ledger;
use crate::blocks::own::OwnObjects;
use crate::ground::task::{Resize, Stage, Task};
use crate::ground::volume::image::Image;
use crate::log::copy::SecondCopy;
use crate::log::sequences::Sequences;
use crate::status::VolumeCounters;
use std::collections::VecDeque;

/// A volume.
pub(crate) struct Volume {
    spec: VolumeSpec,
    facts: Facts,
    ledger: Ledger,
    log: Sequences,
    progress: Progress,
    /// Something has changed for operations that wait in the front.
    recheck: bool,
    /// The backend has more than the image, or gets it.
    redo_is_kept: bool,
    /// Acknowledgements that wait for the drain (write-through), by sequence.
    through: VecDeque<OpId>,
    backlog: Backlog,
    /// Blocks in records that are not published.
    unpublished_blocks: u64,
    /// Something was dropped from the index without a record that says so. Until the checkpoint of
    /// this number is durable, a crash would bring it back.
    forgotten_until: u64,
    backend: Backend,
    image: Image,
    count: VolumeCounters,
    /// Its second copy, at another host.
    copy: Option<Box<SecondCopy>>,
    follower: Follower,
}

/// What the volume does and what it does not any more.
struct Facts {
    /// The mode in force.
    mode: Mode,
    /// See [`Engine::set_degraded`](crate::Engine::set_degraded).
    degraded: Degraded,
    attached: bool,
    failed: bool,
    fenced: bool,
    /// New requests are refused.
    closing: bool,
    task: Task,
}

/// What a volume is to the host that owns it, where that is another one.
#[derive(Default)]
struct Follower {
    /// It is the second copy of that host's volume, and takes nothing of an owner before this
    /// generation.
    promised: Option<u64>,
    /// What that owner was told that it may send.
    reserve: Reserve,
}

impl Volume {
    /// One that is not attached, with nothing in it.
    pub(crate) fn new(spec: VolumeSpec) -> Volume {
        let facts = Facts {
            mode: spec.mode,
            degraded: Degraded::No,
            attached: false,
            failed: false,
            fenced: false,
            closing: false,
            task: Task::None,
        };
        let image = Image::unknown(spec.size_bytes);
        Volume {
            spec,
            facts,
            ledger: Ledger::new(),
            log: Sequences::default(),
            progress: Progress::default(),
            recheck: false,
            redo_is_kept: false,
            through: VecDeque::new(),
            backlog: Backlog::default(),
            unpublished_blocks: 0,
            forgotten_until: 0,
            backend: Backend::new(),
            image,
            count: VolumeCounters::default(),
            copy: None,
            follower: Follower::default(),
        }
    }

    /// A new one, which is served.
    pub(crate) fn served(spec: VolumeSpec) -> Volume {
        let mut volume = Volume::new(spec);
        volume.facts.attached = true;
        volume
    }

    /// An empty copy of another host's volume: the record after `base` is the first one that it
    /// takes.
    pub(crate) fn copy_of(spec: VolumeSpec, base: u64) -> Volume {
        let mut volume = Volume::new(spec);
        volume.become_copy();
        volume.begin_behind(base);
        volume
    }

    fn begin_behind(&mut self, base: u64) {
        self.set_sequence(base, 0);
        self.progress.restore_drained(base);
    }

    /// As it was asked for.
    pub(crate) fn spec(&self) -> &VolumeSpec {
        &self.spec
    }

    /// The mode in force.
    pub(crate) fn mode(&self) -> Mode {
        self.facts.mode
    }

    /// It has its backend, or is about to get it.
    pub(crate) fn is_attached(&self) -> bool {
        self.facts.attached
    }

    /// Data of it is lost that cannot be named.
    pub(crate) fn is_failed(&self) -> bool {
        self.facts.failed
    }

    /// Another owner has the image.
    pub(crate) fn is_fenced(&self) -> bool {
        self.facts.fenced
    }

    /// New requests are refused.
    pub(crate) fn is_closing(&self) -> bool {
        self.facts.closing
    }

    /// What is being done to it as a whole.
    pub(crate) fn task(&self) -> Task {
        self.facts.task
    }

    /// Where its blocks are.
    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Where its blocks are, to be changed.
    pub(crate) fn ledger_mut(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    /// How far its log is.
    pub(crate) fn log(&self) -> &Sequences {
        &self.log
    }

    /// How far its log is, for what moves it.
    pub(super) fn log_mut(&mut self) -> &mut Sequences {
        &mut self.log
    }

    /// How far its drain is.
    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }

    /// How far its drain is, for what moves it or wants it to move.
    pub(crate) fn progress_mut(&mut self) -> &mut Progress {
        &mut self.progress
    }

    /// Its backend.
    pub(crate) fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Its backend, to tell what becomes of it.
    pub(crate) fn backend_mut(&mut self) -> &mut Backend {
        &mut self.backend
    }

    /// Its counters.
    pub(crate) fn count(&self) -> &VolumeCounters {
        &self.count
    }

    /// Its counters, to count something.
    pub(crate) fn count_mut(&mut self) -> &mut VolumeCounters {
        &mut self.count
    }

    /// Its second copy, at another host.
    pub(crate) fn copy(&self) -> Option<&SecondCopy> {
        self.copy.as_deref()
    }

    /// Its second copy, to tell what becomes of it.
    pub(crate) fn copy_mut(&mut self) -> Option<&mut SecondCopy> {
        self.copy.as_deref_mut()
    }

    /// What the owner of this copy was told that it may send.
    pub(crate) fn reserve(&self) -> &Reserve {
        &self.follower.reserve
    }

    /// What the owner of this copy was told that it may send, and what it has sent.
    pub(crate) fn reserve_mut(&mut self) -> &mut Reserve {
        &mut self.follower.reserve
    }

    /// The lowest generation of an owner that this copy takes something of; `None` if it is no
    /// copy.
    pub(crate) fn promised(&self) -> Option<u64> {
        self.follower.promised
    }

    /// The volume of the image's parent, if this one reads through it.
    pub(crate) fn parent(&self) -> Option<VolumeId> {
        self.image.parent()
    }

    /// The backlog of another mode is over when the record of this sequence is safe.
    pub(crate) fn backlog(&self) -> u64 {
        self.backlog.sequence()
    }

    /// Something has changed for operations that wait in the front.
    pub(crate) fn recheck(&mut self) {
        self.recheck = true;
    }

    /// Something has changed for operations that wait in the front, which has not been looked at.
    pub(crate) fn is_to_be_rechecked(&self) -> bool {
        self.recheck
    }

    /// Tells [`Volume::is_to_be_rechecked`]; it is looked at now.
    pub(crate) fn take_recheck(&mut self) -> bool {
        std::mem::take(&mut self.recheck)
    }

    /// Something is done to it as a whole from now on.
    pub(crate) fn begin(&mut self, task: Task) {
        self.facts.task = task;
    }

    /// Nothing is done to it as a whole any more.
    pub(crate) fn end_task(&mut self) {
        self.facts.task = Task::None;
    }

    /// Requests are refused from now on.
    pub(crate) fn close(&mut self) {
        self.facts.closing = true;
    }

    /// Nothing is done to it as a whole any more, and requests are taken again.
    pub(crate) fn open_again(&mut self) {
        self.end_task();
        self.facts.closing = false;
    }

    /// Data of it is lost that cannot be named. Tells whether that is new.
    pub(crate) fn fail(&mut self) -> bool {
        !std::mem::replace(&mut self.facts.failed, true)
    }

    /// Another owner has the image. Tells whether that is new; without a backend it does not
    /// matter.
    pub(super) fn fence(&mut self) -> bool {
        self.facts.attached && !std::mem::replace(&mut self.facts.fenced, true)
    }

    /// What replay has found: how far the log goes, and whether something is lost that cannot be
    /// named.
    pub(crate) fn end_replay(&mut self, sequence: u64, chain: u32, failed: bool) {
        self.facts.failed = failed || self.facts.failed && !mutated!(RestartForgetsFailure);
        self.set_sequence(sequence, chain);
    }

    /// The record `sequence` takes effect again.
    pub(crate) fn replay(&mut self, sequence: u64) {
        self.log.replay(sequence);
    }

    /// A start has found nothing dirty: all of the log is in the backend.
    pub(crate) fn begin_drained(&mut self) {
        self.progress.restore_drained(self.log.published());
    }

    /// It is attached as `spec` says, in a mode: what its image has is to be found out anew, and it
    /// is nobody's copy.
    pub(crate) fn attach(&mut self, spec: VolumeSpec, mode: Mode) {
        self.facts.mode = mode;
        self.image.open_again(spec.size_bytes);
        self.spec = spec;
        self.facts.attached = true;
        self.facts.degraded = Degraded::No;
        self.follower.promised = None;
        self.copy = None;
        self.backend.attach();
    }

    /// What is in the log when it is attached is a backlog.
    pub(crate) fn begin_with_backlog(&mut self) {
        self.backlog.extend(self.log.published());
    }

    /// Its mode is to be this one; see [`Volume::enter_mode`].
    pub(crate) fn ask_for_mode(&mut self, mode: Mode) {
        self.spec.mode = mode;
    }

    /// What it does while none of its second copies counts. Tells whether that is new.
    pub(crate) fn degrade(&mut self, degraded: Degraded) -> bool {
        std::mem::replace(&mut self.facts.degraded, degraded) != degraded
    }

    /// Puts the mode in force that it is to have.
    pub(crate) fn enter_mode(&mut self) {
        let mode = match self.spec.mode {
            Mode::WriteBack if self.facts.degraded != Degraded::No => Mode::WriteThrough,
            mode => mode,
        };
        let before = std::mem::replace(&mut self.facts.mode, mode);
        self.recheck();
        let built = self.log.built();
        if mode != Mode::WriteBack {
            self.progress.want_only(built);
        }
        if mode != Mode::WriteBack && before == Mode::WriteBack {
            // Only what is acknowledged is a backlog: in the other modes nobody was promised what
            // is not in the image.
            self.backlog.begin(built);
        }
    }

    /// Its drain is to go by groups from now on, and does not yet.
    pub(crate) fn groups_begin(&self) -> bool {
        let grouped = self.spec.drain == DrainOrder::Grouped && !self.progress.is_grouped();
        grouped && self.facts.mode == Mode::WriteBack
    }

    /// The cache device has failed: what is not published never will be, and changes go past the
    /// cache.
    pub(crate) fn go_past_device(&mut self) {
        self.unpublished_blocks = 0;
        self.log.abandon();
        self.backlog.extend(self.log.published());
        self.progress.want(u64::MAX);
        self.facts.mode = Mode::WriteAround;
        self.recheck();
    }

    /// Most dirty bytes that are asked for; 0 for the default share.
    pub(crate) fn ask_for_quota(&mut self, bytes: u64) {
        self.spec.dirty_bytes_max = bytes;
    }

    /// Another [`VolumeSpec::attachment`] is recorded from now on.
    pub(crate) fn replace_attachment(&mut self, attachment: Vec<u8>) {
        self.spec.attachment = attachment;
    }

    /// Its size changes. Where it becomes smaller, nobody gets beyond the new end from now on.
    pub(crate) fn begin_resize(&mut self, control: u64, size_bytes: u64) {
        let old_bytes = self.spec.size_bytes;
        self.facts.task = Task::Resize(Resize::new(control, old_bytes, size_bytes));
        self.spec.size_bytes = size_bytes.min(old_bytes);
    }

    /// A change of its size waits for something else now.
    pub(crate) fn go_on_with_resize(&mut self, stage: Stage) {
        let Task::Resize(resize) = self.facts.task else {
            unreachable!("the volume is being resized")
        };
        self.facts.task = Task::Resize(resize.at(stage));
    }

    /// A change of its size is over, with this result if not the image had another. Tells its
    /// control number.
    pub(crate) fn end_resize(&mut self, result: Result<(), ControlError>) -> u64 {
        let Task::Resize(resize) = self.facts.task else {
            unreachable!("the volume is being resized")
        };
        // What an image has become it is, whether that could be recorded or not.
        let changed = match resize.stage() {
            Stage::Recorded { result, .. } => result,
            _ => result,
        };
        self.spec.size_bytes = resize.last_bytes(changed);
        self.end_task();
        resize.control()
    }

    /// Its second copy counts for something else. There is one from now on, or with
    /// [`Pairing::Alone`] soon none.
    pub(crate) fn pair(&mut self, pairing: Pairing) {
        let built = self.log.built();
        self.copy.get_or_insert_default().set_pairing(pairing, built);
    }

    /// It has no second copy any more.
    pub(crate) fn forget_copy(&mut self) {
        self.copy = None;
    }

    /// It is the copy of another host's volume, or is one already.
    pub(crate) fn become_copy(&mut self) {
        let generation = self.spec.generation;
        self.follower.promised.get_or_insert(generation);
    }

    /// This copy takes nothing of an owner before `generation` any more.
    pub(crate) fn promise(&mut self, generation: u64) {
        self.follower.promised = self.follower.promised.max(Some(generation));
    }

    /// Everything in this copy is thrown away.
    pub(crate) fn throw_away(&mut self) {
        self.ledger.reset();
        self.facts.failed = false;
    }

    /// This copy begins anew, empty, as its owner says.
    pub(crate) fn begin_anew(&mut self, begin: Begin) {
        self.spec.generation = begin.generation;
        self.spec.size_bytes = begin.size_bytes;
        self.follower.promised = Some(begin.generation);
        self.begin_behind(begin.base);
        self.end_task();
    }

    /// It is known what its image had of its own when that was opened.
    pub(crate) fn find_own(&mut self, found: &OwnObjects) {
        self.image.find(found);
    }

    /// What its image has from a parent of so many bytes is read through the volume `parent`.
    pub(crate) fn read_through(&mut self, parent: VolumeId, parent_bytes: u64) {
        self.image.read_through(parent, parent_bytes);
    }

    /// Something is sent to its backend.
    pub(super) fn note_backend_op(&mut self, op: &BackendOp) {
        self.image.note_op(op);
        let count = &mut self.count;
        match *op {
            BackendOp::Read { buf, .. } => {
                count.backend_reads += 1;
                count.backend_read_bytes += u64::from(buf.len);
            }
            BackendOp::Write { buf, .. } | BackendOp::RedoWrite { buf, .. } => {
                count.backend_writes += 1;
                count.backend_written_bytes += u64::from(buf.len);
            }
            _ => {}
        }
    }

    /// Data blocks are in a record that is being built.
    pub(super) fn note_data_built(&mut self, blocks: u64) {
        self.unpublished_blocks += blocks;
    }

    /// Data blocks of a record take effect.
    pub(super) fn note_data_published(&mut self, blocks: u64) {
        self.unpublished_blocks -= blocks;
    }

    /// Blocks that it has dirty, or will have when what is in the log takes effect.
    pub(crate) fn blocks_used(&self) -> u64 {
        self.ledger.held() + self.unpublished_blocks
    }

    /// Something of it is dropped without a record that says so: it may come back until this
    /// checkpoint is durable.
    pub(crate) fn forget_until(&mut self, checkpoint: u64) {
        self.forgotten_until = checkpoint;
    }

    /// Something that was dropped would come back with a crash, as long as `durable` is the newest
    /// durable checkpoint.
    pub(crate) fn may_remember(&self, durable: u64) -> bool {
        self.forgotten_until > durable
    }

    /// Whether the backend has more than the image, or gets it.
    pub(crate) fn note_redo(&mut self, is_kept: bool) {
        self.redo_is_kept = is_kept;
    }

    /// An acknowledgement waits for the drain, behind those of which `is_before` holds.
    pub(crate) fn wait_for_drain(&mut self, op: OpId, is_before: impl Fn(OpId) -> bool) {
        let at = self.through.iter().rposition(|&other| is_before(other));
        self.through.insert(at.map_or(0, |i| i + 1), op);
    }

    /// An acknowledgement waits for the drain of all that is in the log.
    pub(crate) fn wait_for_all_drained(&mut self, op: OpId) {
        self.through.push_back(op);
    }

    /// The acknowledgement that waits for the drain and is next.
    pub(crate) fn next_through(&self) -> Option<OpId> {
        self.through.front().copied()
    }

    /// The next acknowledgement need not wait for the drain any longer.
    pub(crate) fn end_through(&mut self) {
        self.through.pop_front();
    }

    /// Takes out all acknowledgements that wait for the drain.
    pub(crate) fn take_through(&mut self) -> VecDeque<OpId> {
        std::mem::take(&mut self.through)
    }

    /// Takes so many bytes of what may be acknowledged ahead of the drain; false if there are
    /// fewer.
    pub(crate) fn take_credit(&mut self, bytes: u64) -> bool {
        self.backlog.take_credit(bytes)
    }

    /// The backend has everything up to `sequence`, as far as it is not lost.
    pub(crate) fn note_drained(&mut self, sequence: u64) {
        let lost = self.has_loss();
        self.progress.advance_drained(sequence, self.log.published(), lost);
        self.backlog.note_safe(self.progress.safe());
    }

    /// So many of its blocks have become clean.
    pub(crate) fn note_blocks_drained(&mut self, blocks: u64) {
        self.count.drained_blocks += blocks;
        self.backlog.note_drained(blocks, self.progress.safe());
    }

    /// Blocks of the volume; the last one may be cut by the size.
    pub(crate) fn blocks(&self) -> u64 {
        self.spec.size_bytes.div_ceil(BLOCK_BYTES as u64)
    }

    /// Everything up to `sequence` is known and durable.
    fn set_sequence(&mut self, sequence: u64, chain: u32) {
        self.log.restore(sequence, chain);
        self.progress.restore_sent(sequence);
    }

    /// As it would be recovered: what it holds, and nothing of what was being done with it.
    pub(crate) fn let_go(&mut self) {
        let mut left = Volume::new(self.spec.clone());
        left.facts.failed = self.facts.failed;
        left.ledger = self.ledger.take_restarted();
        left.set_sequence(self.log.published(), self.log.chain_published());
        left.progress.restore_drained(self.progress.drained());
        left.forgotten_until = self.forgotten_until;
        left.count = std::mem::take(&mut self.count);
        *self = left;
    }
}

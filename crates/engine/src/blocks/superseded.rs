//! Copies that are not current any more: those that a group needs keep their place, the others are
//! of no use.

use crate::blocks::delta::Deltas;
use crate::blocks::index::{Lookup, Position};
use crate::blocks::space::Space;

/// What superseding copies has come to.
#[derive(Default)]
pub(super) struct Superseded {
    /// Blocks that are not dirty any more.
    pub(super) cleaned: u64,
    /// Of these, those that the closed group needs.
    pub(super) frozen: u64,
}

/// Copies that were current are not any more. Those that the closed group needs keep their place.
pub(super) fn supersede(
    deltas: &mut Option<Box<Deltas>>,
    space: &mut Space,
    block: u64,
    n: u32,
    was: Lookup,
) -> Superseded {
    let mut gone = Superseded::default();
    let Lookup::At(position) = was else { return gone };
    let Some(closed) = deltas.as_mut().and_then(|deltas| deltas.closed.as_mut()) else {
        gone.cleaned = kill(space, n, was);
        return gone;
    };
    for i in 0..n {
        let (block, position) = (block + u64::from(i), position + i);
        let needed = closed.delta.index.lookup(block) == Lookup::At(position);
        if space.marks.is_dirty(position) && needed {
            space.freeze(position);
            closed.frozen.push(block);
            gone.frozen += 1;
            gone.cleaned += 1;
        } else {
            gone.cleaned += u64::from(space.kill(position));
        }
    }
    gone
}

/// Copies are of no use any more; tells how many were dirty.
pub(super) fn kill(space: &mut Space, n: u32, was: Lookup) -> u64 {
    match was {
        Lookup::At(position) => (position..position + n).filter(|&p| space.kill(p)).count() as u64,
        Lookup::Absent | Lookup::Zero | Lookup::Lost => 0,
    }
}

/// What was used is no less wanted when it has been written again.
pub(super) fn inherit_refs(space: &mut Space, was: Lookup, n: u32, position: Position) {
    let Lookup::At(old) = was else { return };
    for i in 0..n {
        let refs = space.marks.refs(old + i);
        if refs > 0 {
            space.marks.set_refs(position + i, refs);
        }
    }
}

//! Metadata contexts: properties of ranges of an export that a client can query.

/// A metadata context that this server offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Context {
    /// `base:allocation`: [`crate::wire::STATE_HOLE`] and [`crate::wire::STATE_ZERO`].
    Allocation,
    /// `tidepool:dirty`: [`crate::wire::STATE_DIRTY`] and [`crate::wire::STATE_CACHED`].
    Dirty,
}

impl Context {
    /// All contexts, in the order of their ids.
    pub const ALL: [Context; 2] = [Context::Allocation, Context::Dirty];

    /// The context's name in queries.
    pub fn name(self) -> &'static str {
        match self {
            Context::Allocation => "base:allocation",
            Context::Dirty => "tidepool:dirty",
        }
    }

    /// The context's id in replies; identical on every connection.
    pub fn id(self) -> u32 {
        match self {
            Context::Allocation => 1,
            Context::Dirty => 2,
        }
    }
}

/// The metadata contexts that a client has selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Contexts(u8);

impl Contexts {
    /// No context.
    pub const NONE: Contexts = Contexts(0);
    /// All contexts.
    pub const ALL: Contexts = Contexts(0b110);

    /// Adds a context.
    pub fn insert(&mut self, context: Context) {
        self.0 |= 1 << context.id();
    }

    /// Whether the context is selected.
    pub fn contains(self, context: Context) -> bool {
        self.0 & (1 << context.id()) != 0
    }

    /// Whether no context is selected.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The selected contexts, in the order of their ids.
    pub fn iter(self) -> impl Iterator<Item = Context> {
        Context::ALL.into_iter().filter(move |&context| self.contains(context))
    }

    /// Adds the contexts that a `LIST_META_CONTEXT` query matches. The query is an exact name, or a
    /// whole namespace with its colon.
    pub(crate) fn find(&mut self, query: &[u8]) {
        for context in Context::ALL {
            let name = context.name().as_bytes();
            let namespace_bytes = name.iter().position(|&b| b == b':').map_or(0, |at| at + 1);
            if query == name || query == &name[..namespace_bytes] {
                self.insert(context);
            }
        }
    }

    /// Adds the context that a `SET_META_CONTEXT` query selects: an exact name only.
    pub(crate) fn select(&mut self, query: &[u8]) {
        for context in Context::ALL {
            if query == context.name().as_bytes() {
                self.insert(context);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_lists_but_does_not_select() {
        let (mut listed, mut selected) = (Contexts::NONE, Contexts::NONE);
        for query in
            ["base:", "tidepool:dirty", "tidepool", "", "base:allocation2", "qemu:allocation-depth"]
        {
            listed.find(query.as_bytes());
            selected.select(query.as_bytes());
        }
        assert_eq!(listed, Contexts::ALL);
        assert_eq!(selected.iter().collect::<Vec<_>>(), [Context::Dirty]);
        assert_eq!(Contexts::ALL.iter().collect::<Vec<_>>(), Context::ALL);
    }
}

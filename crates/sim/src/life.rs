//! A life of the core: which one it is, and how it is lived.

pub use crate::api::Life;
use crate::pair;
use crate::rng::{Chance, Draws};
use crate::trace::Trace;
use crate::world::{Outcome, World};

/// Who is in a life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// One host.
    OneHost,
    /// Two hosts with a copy of one volume each.
    TwoHosts,
}

impl Kind {
    /// Its name in files and messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::OneHost => "one-host",
            Kind::TwoHosts => "two-hosts",
        }
    }

    /// The kind of this name.
    pub fn of_name(name: &str) -> Option<Kind> {
        [Kind::OneHost, Kind::TwoHosts].into_iter().find(|kind| kind.name() == name)
    }
}

impl Life {
    /// Lives it. A panic of the core is an outcome, too.
    pub fn run(&self, verbose: bool) -> Outcome {
        self.live(Chance::of(self.seed), verbose, Trace::default()).0
    }

    /// Lives it, and notes in `trace` what its cores do.
    pub fn trace(&self, trace: Trace) -> Outcome {
        self.live(Chance::of(self.seed), false, trace).0
    }

    /// Lives it, and keeps what it has drawn.
    pub fn record(&self) -> (Outcome, Draws) {
        self.live(Chance::recorded(self.seed), false, Trace::default())
    }

    /// Lives it with what was drawn once, and with its seed when that is used up.
    pub fn replay(&self, draws: Draws, verbose: bool) -> Outcome {
        self.live(Chance::replayed(self.seed, draws), verbose, Trace::default()).0
    }

    /// The arguments that live it again.
    pub fn replay_arguments(&self) -> String {
        let pair = if self.kind == Kind::TwoHosts { "--pair " } else { "" };
        format!("{pair}--seed {} --seconds {}", self.seed, self.seconds)
    }

    fn live(&self, chance: Chance, verbose: bool, trace: Trace) -> (Outcome, Draws) {
        if self.kind == Kind::TwoHosts {
            return pair::live(chance, self.seconds, verbose, trace);
        }
        let mut world = World::new(chance, self.seconds, verbose, trace);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.run()));
        let outcome = result.unwrap_or_else(|panic| {
            let what = panic.downcast_ref::<String>().map(String::as_str);
            let what = what.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("?");
            world.after_panic(&format!("panic: {what}"))
        });
        (outcome, world.draws())
    }
}

//! Which mutant is in force: the one whose number is in the environment's MUTANT.
//!
//! With MUTANT=record none is, and at exit the numbers of those that would have changed something
//! are written to the file that MUTANT_REACHED names.

use std::intrinsics::const_eval_select;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

const MUTANTS_MAX: usize = 0;
const RECORD: u32 = u32::MAX;

static ACTIVE: AtomicU32 = AtomicU32::new(0);
static NOTED: [AtomicBool; MUTANTS_MAX] = [const { AtomicBool::new(false) }; MUTANTS_MAX];

// SAFETY: this is how the C library declares it.
unsafe extern "C" {
    fn atexit(function: extern "C" fn()) -> i32;
}

// SAFETY: the loader calls the functions in this section before `main`, with arguments that `begin`
// does not take.
#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    match std::env::var("MUTANT") {
        Ok(text) if text == "record" => {
            ACTIVE.store(RECORD, Relaxed);
            // SAFETY: `end` is a function that may be called at any time.
            unsafe { atexit(end) };
        }
        Ok(text) => ACTIVE.store(text.parse().unwrap(), Relaxed),
        Err(_) => {}
    }
}

extern "C" fn end() {
    let Ok(path) = std::env::var("MUTANT_REACHED") else { return };
    let noted = (0..MUTANTS_MAX).filter(|&number| NOTED[number].load(Relaxed));
    let text: String = noted.map(|number| format!("{number}\n")).collect();
    std::fs::write(path, text).unwrap();
}

/// Whether no mutant from `first` to `last` is in force, and none is to be noted.
#[inline(always)]
pub const fn off(first: u32, last: u32) -> bool {
    const fn compiler(_: u32, _: u32) -> bool {
        true
    }
    #[inline(always)]
    fn program(first: u32, last: u32) -> bool {
        let active = ACTIVE.load(Relaxed);
        active.wrapping_sub(first) > last - first && active != RECORD
    }
    const_eval_select((first, last), compiler, program)
}

/// Whether a mutant is in force.
#[inline(always)]
pub const fn on(number: u32) -> bool {
    const fn compiler(_: u32) -> bool {
        false
    }
    #[inline(always)]
    fn program(number: u32) -> bool {
        ACTIVE.load(Relaxed) == number
    }
    const_eval_select((number,), compiler, program)
}

/// Whether a mutant is in force; notes it if that is what is wanted.
#[inline(always)]
pub const fn reached(number: u32) -> bool {
    const fn compiler(_: u32) -> bool {
        false
    }
    #[inline(always)]
    fn program(number: u32) -> bool {
        let active = ACTIVE.load(Relaxed);
        if active == RECORD {
            set(number);
        }
        active == number
    }
    const_eval_select((number,), compiler, program)
}

/// Whether mutants are to be noted.
#[inline(always)]
pub const fn recording() -> bool {
    const fn compiler() -> bool {
        false
    }
    #[inline(always)]
    fn program() -> bool {
        ACTIVE.load(Relaxed) == RECORD
    }
    const_eval_select((), compiler, program)
}

/// Notes, if that is what is wanted, that a mutant would change something.
#[inline(always)]
pub const fn note(number: u32, changes: bool) {
    const fn compiler(_: u32, _: bool) {}
    #[inline(always)]
    fn program(number: u32, changes: bool) {
        if changes && ACTIVE.load(Relaxed) == RECORD {
            set(number);
        }
    }
    const_eval_select((number, changes), compiler, program)
}

#[cold]
fn set(number: u32) {
    NOTED[number as usize].store(true, Relaxed);
}

/// What a function with an iterator of its own type gives.
pub enum Either<'a, R: Iterator> {
    Mutant(Box<dyn Iterator<Item = R::Item> + 'a>),
    Original(R),
}

impl<R: Iterator> Iterator for Either<'_, R> {
    type Item = R::Item;

    fn next(&mut self) -> Option<R::Item> {
        match self {
            Either::Mutant(items) => items.next(),
            Either::Original(items) => items.next(),
        }
    }
}

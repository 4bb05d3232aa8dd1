//! Those who mean harm, or do it: none of them gets in, and none keeps the others waiting.

mod log;
mod names;
mod raw;
mod rounds;

//! Those who mean harm, or do it: none of them gets in, and none keeps the others waiting.

mod admin;
mod doors;
mod forger;
mod holder;
mod intruder;
mod liar;
mod log;
mod mover;
mod names;
mod peers;
mod rounds;
mod together;

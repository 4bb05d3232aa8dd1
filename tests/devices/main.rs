//! A cache drains only into the device that it belongs to, whatever has that device's name by now.

mod counted;
mod kinds;
mod swaps;

//! The program as users run it: one program of tests, so that it is linked once.

mod aborts;
mod audit;
mod bad_input;
mod common;
mod demo;
mod export;
mod lab;
mod lab_report;
mod own_socket;
mod packaging;
mod second_copy;
mod serving;
mod volumes;
mod watchdog;

//! `tidepool serve`.

use crate::cli::ServeArgs;
use crate::log;
use crate::output::bytes_bar;
use indicatif::ProgressBar;
use std::io::{IsTerminal, Write};
use std::sync::{Arc, OnceLock};
use tidepool_daemon::aborts;
use tidepool_daemon::config::{Config, VolumeConfig};
use tidepool_daemon::failure::Failure;
use tidepool_daemon::service::{self, Console};
use tidepool_daemon::units::Size;
use tidepool_replica::Limits;
use tracing::info;

/// Runs the daemon, which waits for other hosts as `limits` says.
pub fn run(args: ServeArgs, limits: Limits) -> Result<(), Failure> {
    let config = configuration(args)?;
    log::start();
    abort_on_panic();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failure::failed(format!("cannot start: {e}")))?;
    let outcome = runtime.block_on(service::serve(config, limits, Arc::new(Terminal::default())));
    // A backend that hangs in a blocking call must not keep the process; the caller ends it on the
    // spot.
    runtime.shutdown_background();
    outcome
}

/// The file's settings under those of the flags.
fn configuration(args: ServeArgs) -> Result<Config, Failure> {
    let mut flags = Config {
        cache: args.cache,
        cache_size: args.cache_size,
        nbd: args.nbd,
        nbd_unencrypted: args.nbd_unencrypted.then_some(true),
        vhost: args.vhost,
        admin: args.admin,
        metrics: args.metrics,
        accept_loss: args.accept_loss,
        drain: args.drain,
        peer: args.peer,
        peer_listen: args.peer_listen,
        without_peer: args.without_peer,
        peer_tls: args.peer_tls,
        peer_allow: args.peer_allow,
        peer_images: args.peer_images,
        ..Config::default()
    };
    for (name, uri) in args.volume {
        let twice = Failure::usage(format!("--volume {name} is given twice: a name has one image"));
        if flags.volume.insert(name, VolumeConfig::new(uri)).is_some() {
            return Err(twice);
        }
    }
    match args.config {
        None => Ok(flags),
        Some(path) => Ok(flags.over(Config::read(&path).map_err(Failure::usage)?)),
    }
}

/// A broken invariant ends the daemon at once, as a kill does: what was acknowledged is in the log,
/// and nothing is written on a state that is not understood.
fn abort_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        let payload = panic.payload();
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let what = text
            .or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("a panic without a message");
        let place = panic
            .location()
            .map(|place| format!(" ({}:{})", place.file(), place.line()))
            .unwrap_or_default();
        let volume = aborts::note_panic();
        log::last_words(&format!(
            "tidepool: internal error: {what}{place}{volume}; please report it (start again: nothing acknowledged is lost)"
        ));
        std::process::abort();
    }));
}

/// Shows the start on the terminal.
#[derive(Default)]
struct Terminal {
    bar: OnceLock<ProgressBar>,
}

impl Console for Terminal {
    fn formatting(&self, done_bytes: u64, total_bytes: u64) {
        let bar = self.bar.get_or_init(|| {
            if !std::io::stderr().is_terminal() {
                info!("formatting a cache of {}", Size(total_bytes).approximate());
            }
            bytes_bar("formatting the cache")
        });
        bar.set_length(total_bytes);
        bar.set_position(done_bytes);
        if done_bytes >= total_bytes {
            bar.finish_and_clear();
        }
    }

    fn ready(&self) {
        // Nobody has to listen, and nobody waits for who should.
        let say = || {
            let mut out = std::io::stdout().lock();
            let _ = writeln!(out, "ready").and_then(|()| out.flush());
        };
        if let Err(error) = std::thread::Builder::new().spawn(say) {
            tracing::warn!("`ready` is not said: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::cli::{Cli, Command};
    use clap::Parser;

    #[test]
    fn a_volume_given_twice_is_refused() {
        let line = ["tidepool", "serve", "--volume", "a=file:/a", "--volume", "a=file:/b"];
        let Command::Serve(args) = Cli::try_parse_from(line).expect("valid").command else {
            panic!("serve")
        };
        let failure = super::configuration(*args).expect_err("twice");
        assert_eq!(failure.exit_status(), 2);
        assert!(failure.to_string().contains("--volume a is given twice"), "{failure}");
    }
}

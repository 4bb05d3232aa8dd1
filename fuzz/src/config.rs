//! The configuration file.

use std::path::Path;
use tidepool_daemon::config::{Config, ConfigError};
use tidepool_daemon::service::{Plan, Wanted};

/// A configuration is refused with a place that is one and a reason on one line, or makes a plan or
/// not. Over itself it is itself.
pub(crate) fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let config = match Config::parse(Path::new("t"), text) {
        Ok(config) => config,
        Err(error) => {
            let line = error.to_string();
            assert!(!line.contains('\n'), "not one line: {line:?}");
            let ConfigError::Invalid { line, column, .. } = error else {
                panic!("it was read: {error}")
            };
            let lines = text.matches('\n').count() + 1;
            assert!((1..=lines).contains(&line) && column >= 1, "line {line}, column {column}");
            return;
        }
    };
    assert_eq!(config.clone().over(config.clone()), config);
    let (loss, drain) = (config.accept_loss, config.drain);
    for (name, volume) in config.volume.clone() {
        let uri = volume.backend.to_string();
        match Wanted::new(name.as_str(), volume, loss, drain, !config.peer.is_empty()) {
            Ok(wanted) => assert_eq!(wanted.name(), name.as_str()),
            Err(failure) => assert!(!failure.to_string().contains('\n'), "{uri}: {failure}"),
        }
    }
    // Without the volumes, whose images would be looked at.
    if let Err(failure) = Plan::new(Config { volume: Default::default(), ..config }) {
        assert!(!failure.to_string().contains('\n'), "not one line: {failure:?}");
    }
}

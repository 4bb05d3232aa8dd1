//! Where an export is, how it is reached, and what its server offers.

use crate::api::OpenOptions;
use crate::error::BackendError;
use std::io::ErrorKind;
use std::time::{Duration, Instant};
use tidepool_engine::api::{BLOCK_BYTES, SECTOR_BYTES};
use tidepool_nbd::client::{ClientError, Negotiated, Stream, Wanted, negotiate};
use tidepool_nbd::{Context, NbdUri, wire};

/// Longest wait for a server to accept a connection or to answer in a handshake.
const ANSWER_WAIT: Duration = Duration::from_secs(5);

/// An export by its URI.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) uri: NbdUri,
    /// Its name in messages.
    pub(super) what: String,
}

/// What the server of an export offers, as far as transfers depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Terms {
    pub(super) size_bytes: u64,
    pub(super) read_only: bool,
    /// The server offers a flush. Without one a write counts as durable when it completes.
    pub(super) flush: bool,
    /// The server offers a command that writes zeroes.
    pub(super) zeroes: bool,
    /// Offsets and lengths are multiples of so many bytes.
    pub(super) block_bytes_min: u32,
    /// Longest range of one request, in bytes.
    pub(super) piece_bytes_max: u32,
}

impl Place {
    pub(super) fn new(uri: &NbdUri) -> Place {
        Place { uri: uri.clone(), what: uri.to_string() }
    }

    /// Connects and negotiates with the server. Waits for some seconds at most, beside the lookup
    /// of the host's name.
    pub(super) fn connect(&self) -> Result<(Stream, Negotiated), BackendError> {
        self.try_connect().map_err(|e| self.error(e))
    }

    fn try_connect(&self) -> Result<(Stream, Negotiated), ClientError> {
        let mut stream = Stream::connect_within(&self.uri, ANSWER_WAIT)?;
        let timeout =
            |source| ClientError::Io { what: "set a timeout for", at: String::new(), source };
        stream.set_timeout(Some(ANSWER_WAIT)).map_err(timeout)?;
        let deadline = Instant::now() + ANSWER_WAIT;
        let wanted = Wanted {
            contexts: vec![Context::Allocation.name().into()],
            ..Wanted::new(&self.uri.export)
        };
        let negotiated = negotiate(&mut stream, wanted, Some(deadline))?;
        Ok((stream, negotiated))
    }

    fn error(&self, error: ClientError) -> BackendError {
        let what = self.what.clone();
        match error {
            ClientError::Tls => BackendError::Unsupported {
                what,
                why: "its server demands TLS, which Tidepool does not speak; serve it without, or through a tunnel".into(),
            },
            ClientError::Refused { message, .. } => BackendError::NotFound {
                what,
                why: format!("its server refuses the export ({message}); see which it has with nbdinfo --list"),
            },
            ClientError::Io { source, .. } => {
                let silent = matches!(source.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock);
                let reason = if silent { "it does not answer".into() } else { source.to_string() };
                BackendError::Unavailable {
                    what,
                    why: format!("its server cannot be reached: {reason}; start it, or correct the address"),
                }
            }
            other => BackendError::Unavailable { what, why: format!("{other}; is it an NBD server?") },
        }
    }
}

impl Terms {
    /// The terms that were negotiated, or why a volume cannot use the export.
    pub(super) fn of(place: &Place, negotiated: &Negotiated) -> Result<Terms, BackendError> {
        let unfit = |why: String| BackendError::Unsupported { what: place.what.clone(), why };
        let (size_bytes, sizes) = (negotiated.size_bytes, negotiated.block_sizes);
        let unit = sizes.min_bytes.max(SECTOR_BYTES as u32);
        if unit > BLOCK_BYTES as u32 {
            return Err(unfit(format!(
                "its server takes no less than {unit} bytes at once, a volume needs blocks of {BLOCK_BYTES}; serve it with a smaller minimum block size"
            )));
        }
        let piece_bytes_max = sizes.payload_bytes_max.min(wire::PAYLOAD_BYTES_MAX) / unit * unit;
        if piece_bytes_max == 0 {
            let max = sizes.payload_bytes_max;
            return Err(unfit(format!(
                "its server takes no more than {max} bytes at once; raise its maximum block size"
            )));
        }
        if size_bytes == 0 {
            return Err(unfit("it is empty; give it a size first".into()));
        }
        if !size_bytes.is_multiple_of(u64::from(unit)) {
            return Err(unfit(format!(
                "its size of {size_bytes} bytes is no multiple of {unit}; enlarge it"
            )));
        }
        Ok(Terms {
            size_bytes,
            read_only: negotiated.offers(wire::FLAG_READ_ONLY),
            flush: negotiated.offers(wire::FLAG_SEND_FLUSH),
            zeroes: negotiated.offers(wire::FLAG_SEND_WRITE_ZEROES),
            block_bytes_min: sizes.min_bytes,
            piece_bytes_max,
        })
    }

    /// Another connection to the server. It fails if the server offers other terms now.
    pub(super) fn connect_again(
        &self,
        place: &Place,
    ) -> Result<(Stream, Negotiated), BackendError> {
        let (stream, negotiated) = place.connect()?;
        if Terms::of(place, &negotiated)? != *self {
            let why = "its server offers something else than a moment ago; try again".into();
            return Err(BackendError::Unavailable { what: place.what.clone(), why });
        }
        Ok((stream, negotiated))
    }

    /// Refuses a read-only export if it is to be written.
    pub(super) fn check_writable(
        &self,
        place: &Place,
        options: &OpenOptions,
    ) -> Result<(), BackendError> {
        if self.read_only && !options.read_only {
            return Err(BackendError::Denied {
                what: place.what.clone(),
                why: "its server offers it read-only; serve it writable, or open the volume read-only".into(),
            });
        }
        Ok(())
    }
}

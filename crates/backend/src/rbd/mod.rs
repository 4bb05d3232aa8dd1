//! `rbd:` images.
use crate::{BackendError, BackendUri, OpenOptions, Opened};
pub(crate) fn open(uri: &BackendUri, _o: &OpenOptions) -> Result<Opened, BackendError> {
    Err(BackendError::Unsupported { what: uri.to_string(), why: "rbd: is not served by this build".into() })
}

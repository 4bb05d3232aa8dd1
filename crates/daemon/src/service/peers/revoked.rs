//! Certificates that are revoked while connections stand.

use super::Certificates;
use crate::failure::one_line;
use crate::shard::ShardHandle;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;
use tracing::warn;

/// How often it is looked which certificates are revoked.
const PAUSE: Duration = Duration::from_secs(1);

/// Has the connections end whose other host has shown a certificate that is revoked meanwhile;
/// until the future is dropped.
pub(in crate::service) async fn watch(certificates: Arc<Certificates>, shard: ShardHandle) {
    let mut said = String::new();
    loop {
        sleep(PAUSE).await;
        match certificates.revoked() {
            Ok(_) => said.clear(),
            Err(error) => {
                let text = one_line(&error);
                if text != said {
                    warn!("{text}; no other host is connected to until that is mended");
                    said = text;
                }
            }
        }
        // Each time: a connection may have passed its check just before.
        let revoked = certificates.known_revoked();
        if !revoked.is_empty() && shard.revoke(revoked).is_err() {
            return;
        }
    }
}

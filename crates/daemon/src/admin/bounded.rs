//! An HTTP server of only so many connections at once; further ones wait to be accepted. One that asks nothing is closed.

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Most connections at once.
const CONNECTIONS_MAX: usize = 64;
/// How long the head of a request may take, from the connection or the answer before on, and then its body.
pub(super) const REQUEST_TIME_MAX: Duration = Duration::from_secs(10);

/// Serves `router` until the future is dropped.
pub async fn serve(mut listener: impl Listener, router: Router) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let service = TowerToHyperService::new(router);
    loop {
        let place = places.clone().acquire_owned().await.expect("the semaphore is never closed");
        let (connection, _) = listener.accept().await;
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(REQUEST_TIME_MAX)
            .serve_connection(TokioIo::new(connection), service.clone());
        tokio::spawn(async move {
            // What goes wrong on a connection is its client's.
            let _ = served.await;
            drop(place);
        });
    }
}

//! An HTTP server of only so many connections at once; further ones wait to be accepted. One that asks nothing is closed.

use super::ErrorBody;
use crate::failure::one_line;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::serve::Listener;
use axum::{Json, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Most connections at once.
const CONNECTIONS_MAX: usize = 64;
/// How long the head of a request may take, from the connection or the answer before on, and then its body.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(10);
/// Largest body of a request in bytes.
const BODY_BYTES_MAX: usize = 64 << 10;

/// Serves `router` until the future is dropped.
pub async fn serve(mut listener: impl Listener, router: Router) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let service = TowerToHyperService::new(router.layer(from_fn(with_whole_body)));
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

/// Hands a request on when all of its body is there.
async fn with_whole_body(request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    match timeout(REQUEST_TIME_MAX, to_bytes(body, BODY_BYTES_MAX)).await {
        Ok(Ok(bytes)) => next.run(Request::from_parts(head, Body::from(bytes))).await,
        Ok(Err(error)) => refusal(StatusCode::PAYLOAD_TOO_LARGE, format!("cannot take the request: {error}")),
        Err(_) => {
            let seconds = REQUEST_TIME_MAX.as_secs();
            refusal(StatusCode::REQUEST_TIMEOUT, format!("the request has not come within {seconds} s"))
        }
    }
}

fn refusal(status: StatusCode, error: String) -> Response {
    (status, Json(ErrorBody { error: one_line(error) })).into_response()
}

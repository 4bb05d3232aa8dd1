//! Answers the admin API and the metrics endpoint.

use super::bounded::{self, BODY_TIME_MAX, Place};
use super::{
    AddVolume, CacheReport, ChangeSnapshot, ErrorBody, FailOver, GaveUp, GiveUp, HandOver, ResizeVolume,
    RollBack, SetVolume, Status, TakeSnapshot, TakeVolume,
};
use crate::counters;
use crate::failure::one_line;
use crate::metrics;
use crate::report::by_name;
use crate::service::{VolumeError, Volumes};
use crate::shard::ShardError;
use crate::units::Duration;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::rejection::BytesRejection;
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use tidepool_backend::BackendError;
use tokio::net::{TcpListener, UnixListener};
use tokio::time::timeout;

/// Largest body of a request in bytes.
const BODY_BYTES_MAX: usize = 64 << 10;

/// What the handlers need.
pub struct Context {
    /// The volumes.
    pub volumes: Arc<Volumes>,
    /// Path of the cache device.
    pub cache: PathBuf,
    /// Its uuid.
    pub cache_uuid: uuid::Uuid,
    /// Name of this host.
    pub host: String,
    /// When the daemon began to serve.
    pub started: Instant,
    /// Accepted loss of volumes that are added without one of their own.
    pub accept_loss: Option<Duration>,
}

/// An error on its way to the caller.
struct Problem(StatusCode, String);

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        (self.0, Json(ErrorBody { error: one_line(self.1) })).into_response()
    }
}

impl From<VolumeError> for Problem {
    fn from(error: VolumeError) -> Problem {
        let status = match &error {
            VolumeError::Unknown(_) => StatusCode::NOT_FOUND,
            VolumeError::Name(_)
            | VolumeError::Uri(_)
            | VolumeError::Invalid { .. }
            | VolumeError::Mode { .. } => StatusCode::BAD_REQUEST,
            VolumeError::Exists(_)
            | VolumeError::SameImage { .. }
            | VolumeError::Snapshot { .. }
            | VolumeError::Busy(_)
            | VolumeError::NotInSync { .. }
            | VolumeError::NotForgotten { .. }
            | VolumeError::WouldLose { .. }
            | VolumeError::NotHandedOver { .. }
            | VolumeError::Behind { .. }
            | VolumeError::Alone { .. }
            | VolumeError::OtherImage { .. }
            | VolumeError::Elsewhere { .. }
            | VolumeError::Shard { source: ShardError::CopyNeeded { .. }, .. } => StatusCode::CONFLICT,
            VolumeError::Open { source: BackendError::Overwritten { .. }, .. } => StatusCode::CONFLICT,
            VolumeError::Open { .. }
            | VolumeError::Silent { .. }
            | VolumeError::Unreachable { .. }
            | VolumeError::Stalled { .. } => StatusCode::BAD_GATEWAY,
            VolumeError::Shard { .. } | VolumeError::Release { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Problem(status, error.to_string())
    }
}

impl From<ShardError> for Problem {
    fn from(error: ShardError) -> Problem {
        Problem(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
    }
}

type Answer<T> = Result<Json<T>, Problem>;

/// Serves the admin API until the future is dropped.
pub async fn serve_admin(listener: UnixListener, context: Arc<Context>) {
    bounded::serve(listener, admin_router(context)).await;
}

/// Serves the metrics until the future is dropped.
pub async fn serve_metrics(listener: TcpListener, context: Arc<Context>) {
    let router = Router::new()
        .route("/metrics", get(scrape))
        .fallback(|| async { (StatusCode::NOT_FOUND, "the metrics are at /metrics\n") })
        .layer(from_fn(with_whole_body))
        .with_state(context);
    bounded::serve(listener, router).await;
}

/// The routes of the admin API, which [`serve_admin`] serves on a socket.
pub fn admin_router(context: Arc<Context>) -> Router {
    let volume = get(volume).patch(set).delete(remove);
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/volumes", get(list).post(add))
        .route("/v1/volumes/{name}", volume)
        .route("/v1/volumes/{name}/drain", post(drain))
        .route("/v1/volumes/{name}/snapshots", get(snapshots).post(snapshot).patch(change_snapshot))
        .route("/v1/volumes/{name}/mirror-snapshots", post(mirror_snapshot))
        .route("/v1/volumes/{name}/rollback", post(roll_back))
        .route("/v1/volumes/{name}/resize", post(resize))
        .route("/v1/volumes/{name}/takeover", post(take_over))
        .route("/v1/volumes/{name}/handoff", post(hand_over))
        .route("/v1/volumes/{name}/give-up", post(give_up))
        .route("/v1/failover", post(fail_over))
        .fallback(|| async { Problem(StatusCode::NOT_FOUND, "there is nothing at this path".into()) })
        .method_not_allowed_fallback(|| async {
            Problem(StatusCode::METHOD_NOT_ALLOWED, "this path does not take this method".into())
        })
        .layer(from_fn(with_whole_body))
        .with_state(context)
}

/// Hands a request on when all of its body is there.
async fn with_whole_body(request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    match timeout(BODY_TIME_MAX, to_bytes(body, BODY_BYTES_MAX)).await {
        Ok(Ok(bytes)) => {
            if let Some(place) = head.extensions.get::<Place>() {
                place.works();
            }
            next.run(Request::from_parts(head, Body::from(bytes))).await
        }
        Ok(Err(error)) => {
            let why = format!("cannot take the request: {error}");
            Problem(StatusCode::PAYLOAD_TOO_LARGE, why).into_response()
        }
        Err(_) => {
            let why = format!("the request has not come within {} s", BODY_TIME_MAX.as_secs());
            Problem(StatusCode::REQUEST_TIMEOUT, why).into_response()
        }
    }
}

/// The request's body as JSON.
fn parse<T: DeserializeOwned>(body: Result<Bytes, BytesRejection>) -> Result<T, Problem> {
    let bytes = body.map_err(|rejection| Problem(rejection.status(), rejection.body_text()))?;
    serde_json::from_slice(&bytes)
        .map_err(|e| Problem(StatusCode::BAD_REQUEST, format!("cannot understand the request: {e}")))
}

fn json<T: Serialize>(value: T) -> Answer<T> {
    Ok(Json(value))
}

/// Runs an operation to its end even when the caller goes away in the middle.
async fn to_the_end<T: Send + 'static>(
    operation: impl Future<Output = Result<T, VolumeError>> + Send + 'static,
) -> Result<T, Problem> {
    match tokio::spawn(operation).await {
        Ok(outcome) => outcome.map_err(Problem::from),
        Err(_) => {
            Err(Problem(StatusCode::INTERNAL_SERVER_ERROR, "the operation ended in an internal error".into()))
        }
    }
}

async fn status(State(context): State<Arc<Context>>) -> Answer<Status> {
    let sample = context.volumes.sample().await?;
    let device = &sample.shard.device;
    let cache = CacheReport {
        path: context.cache.display().to_string(),
        uuid: context.cache_uuid.to_string(),
        failed: device.failed,
        size_bytes: device.size_bytes,
        cached_bytes: sample.volumes.iter().map(|volume| volume.cached_bytes).sum(),
        dirty_bytes: sample.volumes.iter().map(|volume| volume.dirty_bytes).sum(),
        counters: by_name(counters::of_device(device)),
    };
    json(Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        host: context.host.clone(),
        uptime_seconds: context.started.elapsed().as_secs_f64(),
        cache,
        volumes: sample.volumes,
        reactor: by_name(counters::of_reactor(&sample.shard.reactor)),
    })
}

async fn list(State(context): State<Arc<Context>>) -> Answer<Vec<super::VolumeReport>> {
    json(context.volumes.sample().await?.volumes)
}

async fn volume(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
) -> Answer<super::VolumeReport> {
    json(context.volumes.volume_status(&name).await?)
}

async fn add(
    State(context): State<Arc<Context>>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<super::VolumeReport> {
    let asked: AddVolume = parse(body)?;
    let name = asked.name.clone();
    let (volumes, accept_loss) = (context.volumes.clone(), context.accept_loss);
    to_the_end(async move { volumes.add_asked(asked, accept_loss).await }).await?;
    json(context.volumes.volume_status(&name).await?)
}

async fn set(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<super::VolumeReport> {
    let change: SetVolume = parse(body)?;
    let (volumes, of) = (context.volumes.clone(), name.clone());
    to_the_end(async move { volumes.set(&of, change).await }).await?;
    json(context.volumes.volume_status(&name).await?)
}

async fn drain(State(context): State<Arc<Context>>, Path(name): Path<String>) -> Answer<super::VolumeReport> {
    context.volumes.drain(&name).await?;
    json(context.volumes.volume_status(&name).await?)
}

async fn snapshot(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<super::Snapshot> {
    let TakeSnapshot { snapshot } = parse(body)?;
    let volumes = context.volumes.clone();
    json(to_the_end(async move { volumes.snapshot(&name, &snapshot).await }).await?)
}

async fn mirror_snapshot(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
) -> Answer<super::Snapshot> {
    let volumes = context.volumes.clone();
    json(to_the_end(async move { volumes.mirror_snapshot(&name).await }).await?)
}

async fn snapshots(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
) -> Answer<Vec<super::SnapshotReport>> {
    json(context.volumes.snapshots(&name).await?)
}

async fn change_snapshot(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<super::ChangedSnapshot> {
    let ChangeSnapshot { snapshot, action } = parse(body)?;
    let volumes = context.volumes.clone();
    json(to_the_end(async move { volumes.change_snapshot(&name, &snapshot, action).await }).await?)
}

async fn roll_back(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<super::RolledBack> {
    let RollBack { snapshot } = parse(body)?;
    let volumes = context.volumes.clone();
    json(to_the_end(async move { volumes.roll_back(&name, &snapshot).await }).await?)
}

async fn resize(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<super::VolumeReport> {
    let ResizeVolume { size } = parse(body)?;
    let (volumes, of) = (context.volumes.clone(), name.clone());
    to_the_end(async move { volumes.resize(&of, size).await }).await?;
    json(context.volumes.volume_status(&name).await?)
}

async fn take_over(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<super::VolumeReport> {
    let TakeVolume { accept_loss } = parse(body)?;
    let (volumes, of) = (context.volumes.clone(), name.clone());
    to_the_end(async move { volumes.take_over(&of, accept_loss).await }).await?;
    json(context.volumes.volume_status(&name).await?)
}

async fn hand_over(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<super::HandedOver> {
    let HandOver { to, disconnect, live, cancel } = parse(body)?;
    let volumes = context.volumes.clone();
    if cancel {
        return json(volumes.stay(&name)?);
    }
    if live {
        return json(to_the_end(async move { volumes.offer(&name, to.as_deref()).await }).await?);
    }
    json(to_the_end(async move { volumes.hand_over(&name, to.as_deref(), disconnect).await }).await?)
}

async fn give_up(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<GaveUp> {
    let GiveUp { accept_loss } = parse(body)?;
    let volumes = context.volumes.clone();
    json(to_the_end(async move { volumes.give_up(&name, accept_loss).await }).await?)
}

async fn fail_over(
    State(context): State<Arc<Context>>,
    body: Result<Bytes, BytesRejection>,
) -> Answer<Vec<super::FailedOver>> {
    let asked: FailOver = parse(body)?;
    if asked.volumes.is_empty() && asked.fenced.is_none() {
        let why = "a failover needs the names of volumes, or that of the host that is fenced";
        return Err(Problem(StatusCode::BAD_REQUEST, why.into()));
    }
    let volumes = context.volumes.clone();
    json(to_the_end(async move { volumes.fail_over(asked).await }).await?)
}

async fn remove(State(context): State<Arc<Context>>, Path(name): Path<String>) -> Answer<super::Removed> {
    json(context.volumes.remove(&name).await?)
}

async fn scrape(State(context): State<Arc<Context>>) -> Response {
    let sample = match context.volumes.sample().await {
        Ok(sample) => sample,
        Err(error) => return (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")).into_response(),
    };
    match metrics::encode(sample) {
        Ok(text) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

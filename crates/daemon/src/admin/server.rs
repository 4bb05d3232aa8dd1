//! Answers the admin API and the metrics endpoint.

use super::bounded::{self, BODY_TIME_MAX, Place};
use super::{
    AddVolume, CacheReport, ChangeSnapshot, ErrorBody, FailOver, FailoverOutcome, GaveUp, GiveUp,
    HandOver, ResizeVolume, RollBack, SetVolume, SnapshotAction, Status, TakeSnapshot, TakeVolume,
};
use crate::audit::{self, Audit, Caller};
use crate::counters::{self, by_name};
use crate::door::VolumeSocket;
use crate::failure::one_line;
use crate::metrics;
use crate::service::error::VolumeError;
use crate::service::volumes::Volumes;
use crate::shard::ShardError;
use crate::units::Duration;
use crate::volume::DrainOrder;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequestParts, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::convert::Infallible;
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
    volumes: Arc<Volumes>,
    cache: PathBuf,
    cache_uuid: uuid::Uuid,
    host: String,
    started: Instant,
    accept_loss: Option<Duration>,
    audit: Arc<Audit>,
}

impl Context {
    /// A daemon on this `host` that begins to serve now, from a cache device with a path and a
    /// uuid. `accept_loss` is for volumes that are added without one of their own; `audit` writes
    /// down who gives which command.
    pub fn new(
        volumes: Arc<Volumes>,
        (cache, cache_uuid): (PathBuf, uuid::Uuid),
        host: String,
        accept_loss: Option<Duration>,
        audit: Arc<Audit>,
    ) -> Context {
        Context { volumes, cache, cache_uuid, host, started: Instant::now(), accept_loss, audit }
    }
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
            | VolumeError::LeftOut { .. }
            | VolumeError::Shard { source: ShardError::CopyNeeded { .. }, .. } => {
                StatusCode::CONFLICT
            }
            VolumeError::Open { source: BackendError::Overwritten { .. }, .. } => {
                StatusCode::CONFLICT
            }
            VolumeError::Open { .. }
            | VolumeError::Silent { .. }
            | VolumeError::Unreachable { .. }
            | VolumeError::Stalled { .. } => StatusCode::BAD_GATEWAY,
            VolumeError::Shard { .. } | VolumeError::Release { .. } => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
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
        .fallback(|| async {
            Problem(StatusCode::NOT_FOUND, "there is nothing at this path".into())
        })
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
    serde_json::from_slice(&bytes).map_err(|e| {
        Problem(StatusCode::BAD_REQUEST, format!("cannot understand the request: {e}"))
    })
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
        Err(_) => Err(Problem(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the operation ended in an internal error".into(),
        )),
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Caller, Infallible> {
        Ok(parts.extensions.get().cloned().unwrap_or_default())
    }
}

/// A command that is written down, as `tidepool` spells it.
struct Command(Vec<String>);

impl Command {
    fn new(words: &[&str]) -> Command {
        Command(words.iter().map(ToString::to_string).collect())
    }

    /// With this option, if it was given.
    fn flag(mut self, given: bool, option: &str) -> Command {
        self.0.extend(given.then(|| option.to_owned()));
        self
    }

    /// With this option and its value, if it was given.
    fn option(mut self, option: &str, value: Option<impl ToString>) -> Command {
        if let Some(value) = value {
            self.0.extend([option.to_owned(), value.to_string()]);
        }
        self
    }

    /// With the options of a volume's own socket.
    fn socket(self, socket: Option<&VolumeSocket>) -> Command {
        let Some(VolumeSocket { path, owner, group, mode, allow }) = socket else { return self };
        let named = self
            .option("--socket", Some(path.display()))
            .option("--socket-owner", owner.as_ref())
            .option("--socket-group", group.as_ref())
            .option("--socket-mode", *mode);
        allow.iter().fold(named, |command, entry| command.option("--allow", Some(entry)))
    }

    fn text(&self) -> String {
        audit::command(self.0.iter().map(String::as_str))
    }
}

/// What is written down of a command that was done.
trait Told {
    fn told(&self) -> String {
        "done".to_owned()
    }
}

impl Told for () {}
impl Told for super::Removed {}
impl Told for super::HandedOver {}
impl Told for super::Snapshot {}
impl Told for super::ChangedSnapshot {}
impl Told for super::RolledBack {}

impl Told for GaveUp {
    fn told(&self) -> String {
        format!("done: {} bytes are lost", self.bytes)
    }
}

impl Told for Vec<super::FailedOver> {
    fn told(&self) -> String {
        let is_refused = |one: &&super::FailedOver| one.outcome == FailoverOutcome::Refused;
        let outcome = match self.iter().filter(is_refused).count() {
            0 => "done",
            all if all == self.len() => "refused",
            _ => "done in part",
        };
        let of_each = self.iter().map(|one| match &one.why {
            Some(why) if is_refused(&one) => format!("{} refused: {why}", one.name),
            _ => format!("{} {}", one.name, one.outcome.as_str()),
        });
        format!("{outcome}: {}", of_each.collect::<Vec<_>>().join("; "))
    }
}

/// Runs a command, and writes down who has given it and what has become of it.
async fn audited<T: Told>(
    audit: Arc<Audit>,
    caller: Caller,
    command: Command,
    operation: impl Future<Output = Result<T, VolumeError>>,
) -> Result<T, VolumeError> {
    let begun = audit.begin(caller, command.text());
    let outcome = operation.await;
    let result = outcome.as_ref().map_or_else(|error| format!("refused: {error}"), Told::told);
    begun.ended(&result).await;
    outcome
}

async fn status(State(context): State<Arc<Context>>) -> Answer<Status> {
    let sample = context.volumes.sample().await?;
    let device = &sample.shard().device;
    let cache = CacheReport {
        path: context.cache.display().to_string(),
        uuid: context.cache_uuid.to_string(),
        failed: device.failed,
        size_bytes: device.size_bytes,
        cached_bytes: sample.volumes().iter().map(|volume| volume.cached_bytes).sum(),
        dirty_bytes: sample.volumes().iter().map(|volume| volume.dirty_bytes).sum(),
        counters: by_name(counters::of_device(device)),
    };
    json(Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        host: context.host.clone(),
        uptime_seconds: context.started.elapsed().as_secs_f64(),
        cache,
        reactor: by_name(counters::of_reactor(&sample.shard().reactor)),
        volumes: sample.into_volumes(),
    })
}

async fn list(State(context): State<Arc<Context>>) -> Answer<Vec<super::VolumeReport>> {
    json(context.volumes.sample().await?.into_volumes())
}

async fn volume(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
) -> Answer<super::VolumeReport> {
    json(context.volumes.volume_status(&name).await?)
}

async fn add(
    State(context): State<Arc<Context>>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Answer<super::VolumeReport> {
    let asked: AddVolume = parse(body)?;
    let name = asked.name.clone();
    let command = Command::new(&["volume", "add", &format!("{name}={}", asked.backend)])
        .option("--mode", asked.mode)
        .option("--accept-loss", asked.accept_loss)
        .option("--dirty-max", asked.dirty_max)
        .flag(asked.read_only, "--read-only")
        .option("--drain", asked.drain.map(DrainOrder::as_str))
        .socket(asked.socket.as_ref());
    let (volumes, accept_loss, audit) =
        (context.volumes.clone(), context.accept_loss, context.audit.clone());
    let operation = async move { volumes.add_asked(asked, accept_loss).await };
    to_the_end(audited(audit, caller, command, operation)).await?;
    json(context.volumes.volume_status(&name).await?)
}

async fn set(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Answer<super::VolumeReport> {
    let change: SetVolume = parse(body)?;
    let command = Command::new(&["volume", "set", &name])
        .option("--mode", change.mode)
        .option("--accept-loss", change.accept_loss)
        .option("--dirty-max", change.dirty_max)
        .socket(change.socket.as_ref());
    let (volumes, of, audit) = (context.volumes.clone(), name.clone(), context.audit.clone());
    let operation = async move { volumes.set(&of, change).await };
    to_the_end(audited(audit, caller, command, operation)).await?;
    json(context.volumes.volume_status(&name).await?)
}

async fn drain(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
) -> Answer<super::VolumeReport> {
    context.volumes.drain(&name).await?;
    json(context.volumes.volume_status(&name).await?)
}

async fn snapshot(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Answer<super::Snapshot> {
    let TakeSnapshot { snapshot } = parse(body)?;
    let command = Command::new(&["volume", "snap", "create", &name, &snapshot]);
    let (volumes, audit) = (context.volumes.clone(), context.audit.clone());
    let operation = async move { volumes.snapshot(&name, &snapshot).await };
    json(to_the_end(audited(audit, caller, command, operation)).await?)
}

async fn mirror_snapshot(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    caller: Caller,
) -> Answer<super::Snapshot> {
    let command = Command::new(&["volume", "snap", "mirror", &name]);
    let (volumes, audit) = (context.volumes.clone(), context.audit.clone());
    let operation = async move { volumes.mirror_snapshot(&name).await };
    json(to_the_end(audited(audit, caller, command, operation)).await?)
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
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Answer<super::ChangedSnapshot> {
    let ChangeSnapshot { snapshot, action } = parse(body)?;
    let word = match action {
        SnapshotAction::Remove => "rm",
        SnapshotAction::Protect => "protect",
        SnapshotAction::Unprotect => "unprotect",
    };
    let command = Command::new(&["volume", "snap", word, &name, &snapshot]);
    let (volumes, audit) = (context.volumes.clone(), context.audit.clone());
    let operation = async move { volumes.change_snapshot(&name, &snapshot, action).await };
    json(to_the_end(audited(audit, caller, command, operation)).await?)
}

async fn roll_back(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Answer<super::RolledBack> {
    let RollBack { snapshot } = parse(body)?;
    let command = Command::new(&["volume", "snap", "rollback", &name, &snapshot]);
    let (volumes, audit) = (context.volumes.clone(), context.audit.clone());
    let operation = async move { volumes.roll_back(&name, &snapshot).await };
    json(to_the_end(audited(audit, caller, command, operation)).await?)
}

async fn resize(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Answer<super::VolumeReport> {
    let ResizeVolume { size } = parse(body)?;
    let command = Command::new(&["volume", "resize", &name, &size.to_string()]);
    let (volumes, of, audit) = (context.volumes.clone(), name.clone(), context.audit.clone());
    let operation = async move { volumes.resize(&of, size).await };
    to_the_end(audited(audit, caller, command, operation)).await?;
    json(context.volumes.volume_status(&name).await?)
}

async fn take_over(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Answer<super::VolumeReport> {
    let TakeVolume { accept_loss } = parse(body)?;
    let command = Command::new(&["volume", "takeover", &name]).flag(accept_loss, "--accept-loss");
    let (volumes, of, audit) = (context.volumes.clone(), name.clone(), context.audit.clone());
    let operation = async move { volumes.take_over(&of, accept_loss).await };
    to_the_end(audited(audit, caller, command, operation)).await?;
    json(context.volumes.volume_status(&name).await?)
}

async fn hand_over(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Answer<super::HandedOver> {
    let HandOver { to, disconnect, live, cancel } = parse(body)?;
    let command = Command::new(&["volume", "handoff", &name])
        .option("--to", to.as_ref())
        .flag(disconnect, "--disconnect")
        .flag(live, "--live")
        .flag(cancel, "--cancel");
    let (volumes, audit) = (context.volumes.clone(), context.audit.clone());
    let operation = async move {
        match (cancel, live) {
            (true, _) => volumes.stay(&name),
            (false, true) => volumes.offer(&name, to.as_deref()).await,
            (false, false) => volumes.hand_over(&name, to.as_deref(), disconnect).await,
        }
    };
    json(to_the_end(audited(audit, caller, command, operation)).await?)
}

async fn give_up(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Answer<GaveUp> {
    let GiveUp { accept_loss } = parse(body)?;
    let command =
        Command::new(&["volume", "remove", &name, "--give-up"]).flag(accept_loss, "--accept-loss");
    let (volumes, audit) = (context.volumes.clone(), context.audit.clone());
    let operation = async move { volumes.give_up(&name, accept_loss).await };
    json(to_the_end(audited(audit, caller, command, operation)).await?)
}

async fn fail_over(
    State(context): State<Arc<Context>>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Answer<Vec<super::FailedOver>> {
    let asked: FailOver = parse(body)?;
    if asked.volumes.is_empty() && asked.fenced.is_none() {
        let why = "a failover needs the names of volumes, or that of the host that is fenced";
        return Err(Problem(StatusCode::BAD_REQUEST, why.into()));
    }
    let words = ["volume", "failover"].into_iter().chain(asked.volumes.iter().map(String::as_str));
    let command =
        Command::new(&words.collect::<Vec<_>>()).option("--fenced", asked.fenced.as_ref());
    let (volumes, audit) = (context.volumes.clone(), context.audit.clone());
    let operation = async move { volumes.fail_over(asked).await };
    json(to_the_end(audited(audit, caller, command, operation)).await?)
}

async fn remove(
    State(context): State<Arc<Context>>,
    Path(name): Path<String>,
    caller: Caller,
) -> Answer<super::Removed> {
    let command = Command::new(&["volume", "remove", &name]);
    let operation = context.volumes.remove(&name);
    json(audited(context.audit.clone(), caller, command, operation).await?)
}

async fn scrape(State(context): State<Arc<Context>>) -> Response {
    let sample = match context.volumes.sample().await {
        Ok(sample) => sample,
        Err(error) => {
            return (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")).into_response();
        }
    };
    match metrics::encode(sample) {
        Ok(text) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

//! What a host says of itself that calls as the owner of a volume, and whether that is so: its
//! ownership record knows.

use super::images::{as_reached_here, check_place, is_one, is_way_of_this_host};
use super::{Images, Leaving, record_of};
use crate::service::attachment;
use crate::service::plan::drain_order;
use crate::service::volumes::Volumes;
use crate::shard::Counterpart;
use crate::volume::check_name;
use std::time::Duration;
use tidepool_backend::{BackendUri, Ownership};
use tidepool_engine::api::{Mode, Nanos, VolumeId, VolumeSpec};
use tidepool_engine::status::VolumeState;
use tidepool_replica::{Copies, Party, Record};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

/// What an owner wants.
pub(super) enum Wish {
    /// To send its records here.
    Follow {
        /// How long it takes reads without an echo of its beats.
        lease_ns: Nanos,
    },
    /// To have the volume taken over.
    TakeOver,
    /// To have its clients let in.
    Expect(Leaving),
}

/// What an owner has said of itself.
pub(super) struct Said {
    pub(super) wish: Wish,
    pub(super) owner: Party,
    pub(super) generation: u64,
    pub(super) host: String,
    pub(super) name: String,
    pub(super) image: String,
    /// It is another daemon of this host.
    pub(super) is_local: bool,
}

/// Why a host is not taken in as the owner of a volume.
pub(super) struct Refusal {
    /// What the host is told. One whose volume it is not learns nothing of this host from it.
    pub(super) told: String,
    /// What the log here says.
    pub(super) why: String,
}

/// Why an owner is not believed, with what is here and how this host reaches it.
struct Doubt {
    why: String,
    /// What a host is told that the record names.
    told: Option<String>,
}

impl From<String> for Doubt {
    fn from(why: String) -> Doubt {
        Doubt { why, told: None }
    }
}

impl Said {
    /// It is not believed.
    fn doubted(&self, doubt: Doubt) -> Refusal {
        let Doubt { why, told } = doubt;
        let told = match told {
            Some(told) => told,
            None if self.is_local => why.clone(),
            None => format!(
                "this host does not know {} as the owner of volume {} on that image; its log says why",
                self.host, self.name
            ),
        };
        Refusal { told, why }
    }

    /// It is the owner, and is told why that does not do. `backend` is its image as this host
    /// reaches it.
    pub(super) fn refused(&self, backend: &str, why: String) -> Refusal {
        let told = if self.is_local { why.clone() } else { why.replace(backend, &self.image) };
        Refusal { told, why }
    }
}

/// Asks the ownership record whether what an owner says is true. Returns the record, and the volume
/// as it would be here. `turn` is given back when no thread looks any more, which may be later.
pub(super) async fn look(
    said: &Said,
    me: Party,
    volumes: &Volumes,
    turn: OwnedSemaphorePermit,
) -> Result<(Record, VolumeSpec), Refusal> {
    look_up(said, me, volumes, turn).await.map_err(|doubt| said.doubted(doubt))
}

async fn look_up(
    said: &Said,
    me: Party,
    volumes: &Volumes,
    turn: OwnedSemaphorePermit,
) -> Result<(Record, VolumeSpec), Doubt> {
    let named = Named::look(said, me, volumes).await?;
    let found = named.record(said, volumes, turn).await?;
    let record = record_of(&found);
    check_owner(said, &found, &record, &named.uri.to_string())?;
    // The record names the host: it is told.
    let told = |why: String| Doubt { told: Some(why.clone()), why };
    let owner = Counterpart { cache: said.owner.cache, host: said.host.clone() };
    volumes.check_counterpart(&said.name, owner).await.map_err(told)?;
    if !said.is_local {
        volumes.hosts().has_cache(&said.host, said.owner.cache);
    }
    let drain = drain_order(&named.uri, None).into();
    let backend = named.backend(said, volumes, &record).await?;
    let attachment = attachment::encode(None, volumes.socket_of(&said.name).as_ref(), &[])
        .expect("a socket that is there is not too long");
    let spec = VolumeSpec {
        name: said.name.clone(),
        backend,
        size_bytes: 0,
        mode: Mode::WriteBack,
        drain,
        dirty_bytes_max: 0,
        read_only: false,
        generation: 0,
        attachment,
    };
    Ok((record, spec))
}

/// The image that an owner has named, with what is known of it here.
struct Named {
    /// The image as this host reaches it.
    uri: BackendUri,
    /// Images in this host's own way to them, and those that other hosts may name besides.
    own: Vec<BackendUri>,
    listed: Vec<Images>,
    /// The volume of the name that the owner has said, if one is here.
    known: Option<(VolumeId, VolumeSpec, VolumeState)>,
    /// The image that a volume of this name has here, also if it is not open.
    image: Option<BackendUri>,
    /// A copy is here that was begun in a way to the image that this host does not take.
    is_old: bool,
}

impl Named {
    /// Looks what is known here of the image, without asking the image.
    async fn look(said: &Said, me: Party, volumes: &Volumes) -> Result<Named, String> {
        check_name(&said.name).map_err(|e| e.to_string())?;
        if said.owner.cache == me.cache {
            return Err("that is this very host".to_owned());
        }
        let uri: BackendUri = said.image.parse().map_err(|e| format!("{}: {e}", said.image))?;
        let here = volumes.shard().volumes().await.map_err(|e| e.to_string())?;
        let own = volumes.own_images(&here);
        let wanted = volumes.wanted_images();
        let images = here
            .iter()
            .filter_map(|(_, spec, _)| Some((spec.name.clone(), spec.backend.parse().ok()?)));
        let images: Vec<(String, BackendUri)> = images.chain(wanted).collect();
        let listed = volumes.images_of_others().to_vec();
        let uri = if said.is_local { uri } else { as_reached_here(&uri, &own, &listed)? };
        // One image is one volume.
        if let Some((name, _)) =
            images.iter().find(|(name, image)| *name != said.name && is_one(image, &uri))
        {
            return Err(format!("{uri} is here as volume {name}"));
        }
        let known = here.into_iter().find(|(_, spec, _)| spec.name == said.name);
        // A copy may have been begun in a way that this host does not take.
        let is_old = !said.is_local
            && known.as_ref().is_some_and(|(_, spec, state)| {
                let recorded = spec.backend.parse();
                *state == VolumeState::Replica
                    && recorded.is_ok_and(|recorded| !is_way_of_this_host(&recorded, &own, &listed))
            });
        let image = images.into_iter().find(|(name, _)| *name == said.name).map(|(_, image)| image);
        Ok(Named { uri, own, listed, known, image, is_old })
    }

    /// Reads the ownership record of the image, if the image is where others may name one, and is
    /// the one of the volume that is here.
    async fn record(
        &self,
        said: &Said,
        volumes: &Volumes,
        turn: OwnedSemaphorePermit,
    ) -> Result<Ownership, String> {
        let (uri, is_local) = (&self.uri, said.is_local);
        let (own, listed, image) = (self.own.clone(), self.listed.clone(), self.image.clone());
        let read = volumes.ask_image(uri, "reading the ownership record", move |uri| {
            let _turn = turn;
            if !is_local && let Err(why) = check_place(uri, &own, &listed) {
                return Ok(Err(why));
            }
            let same = image.is_none_or(|image| {
                is_one(&image, uri)
                    || tidepool_backend::identity(&image) == tidepool_backend::identity(uri)
            });
            match same {
                true => tidepool_backend::ownership(uri, None).map(Ok),
                false => Ok(Err("another volume of this name is here".into())),
            }
        });
        let found = match timeout(Duration::from_nanos(volumes.limits().record_ns), read).await {
            Ok(Ok(found)) => found?,
            Ok(Err(error)) => return Err(error.to_string()),
            Err(_) => return Err(format!("the ownership record of {uri} cannot be read in time")),
        };
        found.ok_or_else(|| format!("{uri} has no ownership record"))
    }

    /// The image as it is to be written down with the volume. A copy that was begun in another way,
    /// and does not count, is forgotten.
    async fn backend(
        self,
        said: &Said,
        volumes: &Volumes,
        record: &Record,
    ) -> Result<String, String> {
        let Named { uri, known, is_old, .. } = self;
        Ok(match known {
            // The copy does not count, and begins anew.
            Some(_)
                if is_old
                    && !matches!(said.wish, Wish::TakeOver)
                    && record.copies == Copies::Solo =>
            {
                let forgotten = volumes.forget_old_copy(&said.name, &uri);
                let forgotten =
                    timeout(Duration::from_nanos(volumes.limits().record_ns), forgotten).await;
                let forgotten = forgotten
                    .map_err(|_| format!("the copy of {uri} cannot be forgotten in time"))?;
                forgotten.map_err(|error| error.to_string())?;
                uri.to_string()
            }
            // What is to come here does not come in the copy's way.
            Some(_) if is_old && matches!(said.wish, Wish::Expect(_)) => uri.to_string(),
            // A volume that is known has its image by the name that it has here.
            Some((_, known, _)) => known.backend,
            None => uri.to_string(),
        })
    }
}

/// Whether the ownership record of the image names who says that it is the owner.
fn check_owner(said: &Said, found: &Ownership, record: &Record, image: &str) -> Result<(), Doubt> {
    let is_owner = record.owner.cache == said.owner.cache && found.host == said.host;
    if is_owner && record.generation == said.generation {
        return Ok(());
    }
    let why = |image: &str| {
        format!(
            "the ownership record of {image} names {} as owner, in generation {} (a host that was renamed since needs its old name until the volume is served again)",
            found.host, record.generation
        )
    };
    let is_named =
        found.host == said.host || found.peer.as_ref().is_some_and(|peer| peer.host == said.host);
    let told = (is_named && !said.is_local).then(|| why(&said.image));
    Err(Doubt { why: why(image), told })
}

//! Which objects an image or a snapshot has of its own, and which snapshot has the others.

use super::cluster::check;
use super::image::{FEATURE_MIGRATING, FEATURE_OBJECT_MAP, Facts, Image};
use super::object_map::ObjectMap;
use super::place::Site;
use super::pool::IoCtx;
use super::{parent, sys};
use crate::api::Layout;
use std::io;
use tidepool_engine::OwnObjects;

/// Finds the layout of an image that no other client changes, or of its snapshot with this number.
pub(super) fn find(site: &Site, image: &Image, facts: &Facts, snapshot: Option<u64>) -> Layout {
    let found = own_objects(&site.pool, image, facts, snapshot).and_then(|own| {
        let parent = if own.is_some() { parent::find(site, image)? } else { None };
        Ok(Layout { own, parent })
    });
    let image = &site.place.what;
    match &found {
        Err(error) => tracing::warn!(
            %image, %error,
            "what it has of its own is not known: nothing is shared with other clones, and holes are not told"
        ),
        Ok(Layout { own: None, .. }) => tracing::info!(
            %image,
            "it has no valid object map (feature object-map; rbd object-map rebuild): holes are not told, and a clone shares nothing with other clones"
        ),
        Ok(_) => {}
    }
    found.unwrap_or_default()
}

/// The image's own objects; `None` without a valid object map. A look at the objects themselves
/// would not find objects that hold nothing and hide data of the parent.
fn own_objects(
    pool: &IoCtx,
    image: &Image,
    facts: &Facts,
    snapshot: Option<u64>,
) -> io::Result<Option<OwnObjects>> {
    // While an image is migrated, data that is not here may be at the image's source, which is no
    // parent.
    let told = facts.features & FEATURE_OBJECT_MAP != 0 && facts.features & FEATURE_MIGRATING == 0;
    if !told || image.flags()? & sys::FLAGS_MAP_INVALID != 0 {
        return Ok(None);
    }
    let mut overlap = 0u64;
    // SAFETY: a valid image and out pointer.
    check(unsafe { (image.rbd().rbd_get_overlap)(image.handle(), &raw mut overlap) })?;
    let (size_bytes, object_bytes) = image.sizes()?;
    // With striping, the objects of a stripe share their range.
    let stripe = facts.stripe_bytes.max(1);
    let in_stripe = (stripe / object_bytes.max(1)).max(1);
    let stripes = size_bytes.div_ceil(stripe);
    let map = ObjectMap::load(pool, &facts.id, snapshot, size_bytes.div_ceil(object_bytes.max(1)))?;
    let mut own = OwnObjects::none(size_bytes).inheriting(overlap.min(size_bytes));
    for object in map.present() {
        let number = object / in_stripe;
        if number < stripes {
            own.insert(number * stripe, stripe);
        }
    }
    Ok(Some(own))
}

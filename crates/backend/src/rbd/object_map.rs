//! The object map of an image or a snapshot: which of its objects exist. librbd keeps it beside the
//! image (feature object-map). It is read as a whole through the OSDs' class `rbd`: 1 MB for 15
//! TiB. `rbd_diff_iterate2` takes seconds for an image of that size.
//!
//! The layout is that of Ceph's `src/common/bit_vector.hpp` with two bits for each object, stable
//! since Ceph 0.93.

use super::pool::IoCtx;
use std::io;

/// Most objects of an image whose map is read: 64 TiB in objects of 4 MiB.
const OBJECTS_MAX: u64 = 1 << 24;
/// Bytes around the bits: lengths, versions, and the checksums of the parts, which the class leaves
/// out.
const FRAME_BYTES: usize = 64;
/// `OBJECT_NONEXISTENT` (`src/include/rbd/object_map_types.h`).
const ABSENT: u8 = 0;

/// Which objects exist.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ObjectMap {
    objects: u64,
    bits: Vec<u8>,
}

impl ObjectMap {
    /// Reads the map of the image with this id, or of its snapshot with this number, which has
    /// `objects` objects. The map is valid only if the flags of the image or snapshot do not say
    /// otherwise.
    pub(super) fn load(
        pool: &IoCtx,
        id: &str,
        snapshot: Option<u64>,
        objects: u64,
    ) -> io::Result<ObjectMap> {
        if objects > OBJECTS_MAX {
            return Err(io::Error::other(format!(
                "it has {objects} objects, which are too many to be looked at"
            )));
        }
        let name = match snapshot {
            None => format!("rbd_object_map.{id}"),
            Some(number) => format!("rbd_object_map.{id}.{number:016x}"),
        };
        let max = objects.div_ceil(4) as usize + FRAME_BYTES;
        let bytes = pool.call(&name, c"rbd", c"object_map_load", &[], max)?;
        let map = ObjectMap::decode(&bytes)
            .ok_or_else(|| io::Error::other("its object map cannot be read"))?;
        match map.objects >= objects {
            true => Ok(map),
            false => Err(io::Error::other(format!(
                "its object map tells of {} objects of {objects}",
                map.objects
            ))),
        }
    }

    /// Reads a header with its length (version, compatible version, length, number of objects), and
    /// then the bits.
    fn decode(bytes: &[u8]) -> Option<ObjectMap> {
        let (len, rest) = bytes.split_first_chunk::<4>()?;
        let (header, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        let (&[_, compatible], header) = header.split_first_chunk::<2>()?;
        let (_, header) = header.split_first_chunk::<4>()?;
        let (objects, _) = header.split_first_chunk::<8>()?;
        let objects = u64::from_le_bytes(*objects);
        let bits = rest.get(..usize::try_from(objects.div_ceil(4)).ok()?)?;
        (compatible == 1).then(|| ObjectMap { objects, bits: bits.to_vec() })
    }

    /// The numbers of the objects that exist, or may exist.
    pub(super) fn present(&self) -> impl Iterator<Item = u64> {
        let some = self.bits.iter().enumerate().filter(|&(_, &byte)| byte != 0);
        let each = some.flat_map(|(i, &byte)| {
            (0..4).map(move |at| (i as u64 * 4 + at, byte >> (6 - 2 * at) & 3))
        });
        each.filter(|&(object, state)| state != ABSENT && object < self.objects)
            .map(|(object, _)| object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_read_as_ceph_writes_it_and_nothing_else_is_taken_for_one() {
        // Nine objects; 0, 3, 5 and 8 exist, in each of the states.
        let mut bytes = vec![14, 0, 0, 0, 1, 1, 8, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0];
        bytes.extend([0b0100_0011, 0b0010_0000, 0b0100_0001, 0, 0, 0, 0]);
        let map = ObjectMap::decode(&bytes).expect("a map");
        assert_eq!((map.objects, map.present().collect::<Vec<_>>()), (9, vec![0, 3, 5, 8]));
        for end in 0..21 {
            assert_eq!(ObjectMap::decode(&bytes[..end]), None, "{end} bytes");
        }
        bytes[5] = 2;
        assert_eq!(ObjectMap::decode(&bytes), None, "a layout that is not known");
        assert_eq!(ObjectMap::decode(&[255; 40]), None);
    }
}

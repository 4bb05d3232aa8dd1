//! What the name of a device node says: a drive, a part of a drive, or a logical volume.

/// What a device node stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Node {
    /// A whole drive: it can get a partition table.
    Drive,
    /// A partition, or a node that may be a partition: it is used whole, or divided by LVM. The
    /// drive under it is not touched.
    Partition,
    /// A logical volume: it is used whole.
    Volume,
}

/// What the node at `path` stands for. A name that says nothing counts as a partition, so that no
/// partition table is written to the node.
pub(super) fn node(path: &str) -> Node {
    let name = path.strip_prefix("/dev/").unwrap_or(path);
    match name.split('/').collect::<Vec<_>>()[..] {
        [kernel] => kernel_node(kernel),
        ["disk", "by-id", link] if link.starts_with("dm-uuid-LVM") => Node::Volume,
        ["disk", "by-id", link] if is_id_of_drive(link) && !is_part(link) => Node::Drive,
        ["disk", "by-path", link] if !is_part(link) => Node::Drive,
        ["disk", ..] => Node::Partition,
        ["mapper", map] if is_multipath(map) => Node::Drive,
        ["mapper", map] if map.starts_with("mpath") => Node::Partition,
        ["mapper", _] | [_, _] => Node::Volume,
        _ => Node::Partition,
    }
}

/// What a device with this kernel name is.
fn kernel_node(name: &str) -> Node {
    let letters = |prefix: &str| {
        let rest = name.strip_prefix(prefix);
        rest.is_some_and(|rest| {
            !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_lowercase())
        })
    };
    let nvme = name.strip_prefix("nvme").and_then(|rest| rest.split_once('n'));
    if ["sd", "hd", "vd", "xvd"].into_iter().any(letters)
        || nvme.is_some_and(|(controller, space)| is_number(controller) && is_number(space))
    {
        return Node::Drive;
    }
    if name.strip_prefix("dm-").is_some_and(is_number) { Node::Volume } else { Node::Partition }
}

/// The link is made of the identity of a drive, and not of what the drive holds.
fn is_id_of_drive(link: &str) -> bool {
    ["ata-", "nvme-", "sas-", "scsi-", "virtio-", "wwn-"]
        .iter()
        .any(|prefix| link.starts_with(prefix))
}

/// The link is to a partition, as udev names it: `wwn-0x5-part2`.
fn is_part(link: &str) -> bool {
    link.rsplit_once("-part").is_some_and(|(_, number)| is_number(number))
}

/// The map is a multipath map under the name that multipathd gives it: `mpatha`, or the number of
/// the disk.
fn is_multipath(map: &str) -> bool {
    let named = map.strip_prefix("mpath");
    named.is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_lowercase()))
        || (map.len() >= 17
            && map.starts_with('3')
            && map.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drives_partitions_and_volumes_are_known_by_their_names() {
        for (path, is) in [
            ("/dev/sda", Node::Drive),
            ("/dev/sdab", Node::Drive),
            ("/dev/nvme0n1", Node::Drive),
            ("/dev/mapper/mpatha", Node::Drive),
            ("/dev/mapper/3600508b400105e210000900000490000", Node::Drive),
            ("/dev/disk/by-id/wwn-0x5000c500a1b2c3d4", Node::Drive),
            ("/dev/sda5", Node::Partition),
            ("/dev/nvme0n1p3", Node::Partition),
            ("/dev/mapper/mpatha-part1", Node::Partition),
            ("/dev/disk/by-id/wwn-0x5000c500a1b2c3d4-part2", Node::Partition),
            ("/dev/disk/by-partlabel/journal", Node::Partition),
            ("/dev/disk/by-id/lvm-pv-uuid-abc", Node::Partition),
            ("/dev/disk/by-path/pci-0000:00:1f.2-ata-1", Node::Drive),
            ("/dev/disk/by-path/pci-0000:00:1f.2-ata-1-part1", Node::Partition),
            ("/dev/md0", Node::Partition),
            ("/dev/bcache0", Node::Partition),
            ("/dev/vg/lv", Node::Volume),
            ("/dev/mapper/vg-lv", Node::Volume),
            ("/dev/dm-3", Node::Volume),
            ("/dev/disk/by-id/dm-uuid-LVM-abc", Node::Volume),
        ] {
            assert_eq!(node(path), is, "{path}");
        }
    }
}

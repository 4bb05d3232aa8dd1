//! What an image holds, and where it holds nothing.

use super::{MIB, serve};
use crate::common::cluster::Shared;
use crate::common::{Driver, OTHER, OURS, open, options, pattern, refused};
use tidepool_backend::{INFLIGHT_MAX, OpenOptions, Transfer};
use tidepool_engine::api::IoError;
use tidepool_engine::{OBJECT_BYTES, OwnObjects, Source};

#[test]
fn the_image_holds_exactly_what_was_written_and_stays_a_plain_image() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("content", 64);
    let mut model = vec![0u8; 64 << 20];
    let opened = open(&uri, options(OURS)).expect("opened");
    assert_eq!((opened.generation, opened.keep_clean), (1, false));
    let mut driver = Driver::new(opened.backend);
    assert_eq!(driver.backend().size_bytes(), 64 * MIB);
    let mut tokens = Vec::new();
    for slot in 0..200u64 {
        let (offset, len) = (slot * 262_144 + slot % 64 * 512, 512 * (1 + slot as usize * 7 % 448));
        let data = pattern(slot + 1, len);
        model[offset as usize..][..len].copy_from_slice(&data);
        tokens.push(driver.start_write(offset, &data));
    }
    tokens.into_iter().for_each(|token| driver.wait(token).0.expect("a write"));
    // Parts of objects, whole objects, and ranges that contain both.
    for (offset, len) in [
        (0, 4096),
        (1_000_448, 512),
        (3 * MIB + 512, 6 * MIB),
        (12 * MIB, 8 * MIB),
        (21 * MIB, 4096),
    ] {
        driver.other(Transfer::Discard { offset, len }).expect("a discard");
        model[offset as usize..][..len as usize].fill(0);
        assert!(
            driver.read(offset / 4096 * 4096, 8192)
                == model[offset as usize / 4096 * 4096..][..8192]
        );
        let offset = offset + 24 * MIB;
        driver.other(Transfer::WriteZeroes { offset, len }).expect("zeroes");
        model[offset as usize..][..len as usize].fill(0);
    }
    driver.flush().expect("a flush");
    for at in (0..64 * MIB).step_by(MIB as usize) {
        assert!(
            driver.read(at, MIB as usize) == model[at as usize..][..MIB as usize],
            "read at {at}"
        );
    }
    driver.close(true).expect("closed");
    assert!(cluster.export("content") == model, "rbd export differs from what was written");
    assert!(cluster.foreign_write("content"), "a released image can be written by everybody");
    cluster.rbd(&["snap", "create", "content@s"]).expect("a snapshot");
}

#[test]
fn what_lies_past_the_end_reads_as_zero_and_cannot_be_written() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("odd", 8);
    cluster
        .rbd(&["resize", "odd", "--size", "4195840B", "--allow-shrink", "--no-progress"])
        .expect("resized");
    let size = 4 * MIB + 1536;
    let mut driver = serve(&uri);
    assert_eq!(driver.backend().size_bytes(), size);
    let data = pattern(5, 8192);
    driver.write(4 * MIB - 4096, &data).expect("a write across the end");
    let mut expected = data.clone();
    expected[4096 + 1536..].fill(0);
    assert!(driver.read(4 * MIB - 4096, 8192) == expected);
    assert!(driver.read(4 * MIB + 4096, 4096) == vec![0; 4096]);
    driver.write(8 * MIB, &data).expect("a write past the end is dropped");
    driver
        .other(Transfer::Discard { offset: 4 * MIB, len: 1 << 40 })
        .expect("a discard across the end");
    driver.other(Transfer::WriteZeroes { offset: size, len: 4096 }).expect("zeroes past the end");
    driver.close(true).expect("closed");
    let image = cluster.export("odd");
    assert!(
        image.len() as u64 == size
            && image[(4 * MIB - 4096) as usize..(4 * MIB) as usize] == data[..4096]
    );
}

#[test]
fn discarded_objects_give_their_space_back() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("space", 64);
    let mut driver = serve(&uri);
    for object in 0..16 {
        driver.write(object * 4 * MIB, &pattern(object, MIB as usize)).expect("a write");
    }
    let objects = |cluster: &Shared| {
        let prefix = cluster.header("space").replace("rbd_header", "rbd_data");
        cluster
            .rados(&["ls"])
            .expect("objects")
            .lines()
            .filter(|name| name.starts_with(&prefix))
            .count()
    };
    assert_eq!(objects(&cluster), 16);
    driver.other(Transfer::Discard { offset: 4 * MIB, len: 56 * MIB }).expect("a discard");
    assert_eq!(objects(&cluster), 2);
}

#[test]
fn a_full_house_of_transfers_completes() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("full", 16);
    let mut driver = serve(&uri);
    for _ in 0..3 {
        let tokens: Vec<u64> = (0..INFLIGHT_MAX as u64)
            .map(|i| driver.start_write(i * 4096, &pattern(i, 4096)))
            .collect();
        tokens.into_iter().for_each(|token| driver.wait(token).0.expect("a write"));
    }
    driver.close(true).expect("closed");
    let image = cluster.export("full");
    for (i, block) in image.chunks(4096).take(INFLIGHT_MAX).enumerate() {
        assert!(block == pattern(i as u64, 4096));
    }
}

#[test]
fn a_read_only_image_is_read_and_never_changed() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("read-only", 8);
    let mut driver = serve(&uri);
    driver.write(0, &pattern(1, 4096)).expect("a write");
    driver.close(true).expect("closed");
    let opened = open(&uri, OpenOptions { read_only: true, ..options(OTHER) }).expect("opened");
    assert_eq!((opened.generation, opened.keep_clean), (0, false));
    let mut driver = Driver::new(opened.backend);
    assert!(driver.backend().read_only() && driver.read(0, 4096) == pattern(1, 4096));
    let denied = Err(IoError::Errno(libc::EROFS));
    assert_eq!(driver.write(0, &[1; 4096]), denied);
    assert_eq!(driver.other(Transfer::Discard { offset: 0, len: 4096 }), denied);
    driver.flush().expect("a flush");
    driver.close(true).expect("closed");
    let opened = open(&uri, options(OURS)).expect("opened");
    assert!(opened.keep_clean, "a reader is no writer: {}", opened.reason);
}

#[test]
fn an_image_in_a_namespace_works_like_any_other() {
    let Some(cluster) = Shared::get() else { return };
    let namespace = format!("{}/tenant", cluster.pool());
    cluster.rbd(&["namespace", "create", &namespace]).expect("a namespace");
    cluster.rbd_create(&format!("{namespace}/vm"), 8 * MIB).expect("an image");
    let uri = cluster.uri("tenant/vm");
    let mut driver = serve(&uri);
    driver.write(0, &pattern(4, 4096)).expect("a write");
    driver.close(false).expect("closed");
    assert!(refused(&uri, options(OTHER)).contains(&format!("{namespace}/vm")));
    serve(&uri).close(true).expect("closed");
}

/// For each object of an image, whether it is the image's own (o), its parent's (p), or a hole (-);
/// `None` where that is not known. Also returns whether the parent can be shared.
fn layout(uri: &str, options: OpenOptions) -> (Option<String>, bool) {
    let opened = open(uri, options).expect("opened");
    let (size_bytes, layout) = (opened.backend.size_bytes(), opened.layout);
    Driver::new(opened.backend).close(true).expect("closed");
    let letter = |own: &OwnObjects, object: u64| match own.source(object * OBJECT_BYTES, 1).0 {
        Source::Own => 'o',
        Source::Parent => 'p',
        Source::Hole => '-',
    };
    let objects = size_bytes.div_ceil(OBJECT_BYTES);
    let own = layout.own.map(|own| (0..objects).map(|object| letter(&own, object)).collect());
    (own, layout.parent.is_some())
}

#[test]
fn where_an_image_has_nothing_its_object_map_tells() {
    let Some(cluster) = Shared::get() else { return };
    let write = |uri: &str, objects: &[u64]| {
        let mut driver = serve(uri);
        for object in objects {
            driver.write(object * OBJECT_BYTES + 4096, &pattern(1, 4096)).expect("a write");
        }
        driver.close(true).expect("closed");
    };
    let (ours, reading) = (options(OURS), OpenOptions { read_only: true, ..options(OURS) });
    let told = |objects: &str, shared| (Some(objects.to_owned()), shared);
    let uri = cluster.image("sparse", 41);
    write(&uri, &[2, 10]);
    assert_eq!(layout(&uri, ours.clone()), told("--o-------o", false));
    assert_eq!(
        layout(&uri, reading.clone()),
        (None, false),
        "others may write what is only read here"
    );

    // A snapshot has the objects that the image had.
    cluster.rbd(&["snap", "create", "sparse@s"]).expect("a snapshot");
    cluster.rbd(&["snap", "protect", "sparse@s"]).expect("protected");
    write(&uri, &[5]);
    let snapshot = cluster.uri("sparse@s");
    assert_eq!(layout(&snapshot, reading.clone()), told("--o-------o", false));
    assert_eq!(layout(&uri, ours.clone()), told("--o--o----o", false));

    // A clone inherits up to the end of its parent, which is in the middle of an object.
    let child = cluster.uri("child");
    let parent = format!("{}/sparse@s", cluster.pool());
    cluster.rbd(&["clone", &parent, &format!("{}/child", cluster.pool())]).expect("a clone");
    cluster.rbd(&["resize", "child", "--size", "60M"]).expect("larger");
    write(&child, &[0, 13]);
    assert_eq!(layout(&child, ours.clone()), told("opppppppppo--o-", true));
    // A part of the parent that the clone has lost does not come back.
    cluster.rbd(&["resize", "child", "--size", "12M", "--allow-shrink"]).expect("smaller");
    cluster.rbd(&["resize", "child", "--size", "24M"]).expect("larger");
    assert_eq!(layout(&child, ours.clone()), told("opp---", true));
    // A parent that no longer has a name is still inherited from.
    cluster.rbd(&["trash", "mv", "sparse"]).expect("in the trash");
    assert_eq!(layout(&child, ours.clone()), told("opp---", false));

    // Small objects, and stripes.
    for (image, arguments) in [
        ("small", &["--object-size", "1M"][..]),
        ("striped", &["--object-size", "1M", "--stripe-unit", "64K", "--stripe-count", "8"]),
    ] {
        let mut command = vec!["create", image, "--size", "40M"];
        command.extend(arguments);
        cluster.rbd(&command).expect("an image");
        let uri = cluster.uri(image);
        write(&uri, &[2, 9]);
        // A stripe is twice as long as the unit in which the layout is noted.
        let expected = if image == "small" { "--o------o" } else { "--oo----oo" };
        assert_eq!(layout(&uri, ours.clone()), told(expected, false), "{image}");
    }

    // Without an object map, or with an invalid one, nothing is known.
    let uri = cluster.image("without", 8);
    cluster.rbd(&["feature", "disable", "without", "fast-diff,object-map"]).expect("no map");
    assert_eq!(layout(&uri, ours.clone()), (None, false));
    cluster.rbd(&["feature", "enable", "without", "object-map"]).expect("a map");
    assert_eq!(layout(&uri, ours.clone()), (None, false), "it is not valid before it is rebuilt");
    cluster.rbd(&["object-map", "rebuild", "without"]).expect("rebuilt");
    assert_eq!(layout(&uri, ours), told("--", false));
}

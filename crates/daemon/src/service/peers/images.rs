//! Which images another host may name, and how this host reaches them. What the other host has said
//! of a way there (a configuration file, a user of the cluster) is not used: it would have this
//! host open what the other one likes, with the rights of this one.

use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;
use tidepool_backend::BackendUri;

/// Images that other hosts may name: `rbd:POOL[/NAMESPACE][?conf=PATH&id=NAME]`, with what this
/// host takes to reach them, or `file:DIRECTORY`, for those in a directory that both hosts see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Images {
    /// Those of a pool.
    Pool {
        /// The pool.
        pool: String,
        /// Its namespace; empty for the default one.
        namespace: String,
        /// This host's configuration of Ceph, if it is not the default one.
        conf: Option<PathBuf>,
        /// The user that this host is, without `client.`.
        id: Option<String>,
    },
    /// Those below a directory.
    Directory(PathBuf),
}

impl FromStr for Images {
    type Err = String;

    fn from_str(text: &str) -> Result<Images, String> {
        let form =
            || format!("\"{text}\" names no images: write rbd:POOL[/NAMESPACE] or file:DIRECTORY");
        if let Some(directory) = text.strip_prefix("file:") {
            let directory = PathBuf::from(directory);
            return if is_plain(&directory) {
                Ok(Images::Directory(directory))
            } else {
                Err(form())
            };
        }
        let (path, query) =
            text.split_once('?').map_or((text, None), |(path, query)| (path, Some(query)));
        let query = query.map(|query| format!("?{query}")).unwrap_or_default();
        match format!("{path}/image{query}").parse() {
            Ok(BackendUri::Rbd { pool, namespace, image, snapshot: None, conf, id })
                if image == "image" && !path.contains('@') =>
            {
                Ok(Images::Pool { pool, namespace, conf, id })
            }
            _ => Err(form()),
        }
    }
}

impl fmt::Display for Images {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Images::Pool { pool, namespace, .. } => {
                // As a URI has them.
                let (pool, namespace, image) = (pool.clone(), namespace.clone(), "image".into());
                let uri = BackendUri::Rbd {
                    pool,
                    namespace,
                    image,
                    snapshot: None,
                    conf: None,
                    id: None,
                };
                f.write_str(uri.to_string().strip_suffix("/image").unwrap_or_default())
            }
            Images::Directory(directory) => write!(f, "file:{}", directory.display()),
        }
    }
}

/// An absolute path that goes nowhere but down.
fn is_plain(path: &Path) -> bool {
    path.is_absolute()
        && path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
}

/// An image that another host has named, as this host reaches it. `own` are the images of volumes
/// that this host knows; `listed` those that other hosts may name besides. Where none is listed,
/// that is every pool that this host can reach in the way that it takes to images of its own
/// volumes there, or else by default. Of a file [`check_place`] has to be asked, too, since that
/// may block.
///
/// # Errors
/// The other host may not name it. In one line.
pub fn as_reached_here(
    said: &BackendUri,
    own: &[BackendUri],
    listed: &[Images],
) -> Result<BackendUri, String> {
    if let Some(own) = own.iter().find(|own| is_one(own, said)) {
        return Ok(own.clone());
    }
    match said {
        BackendUri::Rbd { pool, namespace, image, snapshot: None, .. } => {
            let ways = listed.iter().filter_map(|images| match images {
                Images::Pool { pool, namespace, conf, id } => Some((pool, namespace, conf, id)),
                Images::Directory(_) => None,
            });
            let known = own.iter().filter(|_| listed.is_empty()).filter_map(|own| match own {
                BackendUri::Rbd { pool, namespace, conf, id, .. } => {
                    Some((pool, namespace, conf, id))
                }
                _ => None,
            });
            let way = ways.chain(known).find(|way| (way.0, way.1) == (pool, namespace));
            let (conf, id) = match way {
                Some((_, _, conf, id)) => (conf.clone(), id.clone()),
                None if listed.is_empty() => (None, None),
                None => {
                    let (pool, namespace) = (pool.clone(), namespace.clone());
                    return Err(denied(
                        said,
                        &Images::Pool { pool, namespace, conf: None, id: None },
                    ));
                }
            };
            let (pool, namespace, image) = (pool.clone(), namespace.clone(), image.clone());
            Ok(BackendUri::Rbd { pool, namespace, image, snapshot: None, conf, id })
        }
        BackendUri::File { path, .. } => {
            let is_listed =
                is_plain(path) && directories(listed).any(|directory| path.starts_with(directory));
            match is_listed {
                true => Ok(BackendUri::File { path: path.clone(), emulate: None, gate: None }),
                false => Err(denied(said, &"file:DIRECTORY")),
            }
        }
        _ => Err(format!("other hosts may not name {said}: this host has no volume on it")),
    }
}

/// Whether this host takes the way to an image that was written down with a copy. Earlier releases
/// have written down what the other host had said. Of a file [`check_place`] has to be asked, too.
pub(in crate::service) fn is_way_of_this_host(
    recorded: &BackendUri,
    own: &[BackendUri],
    listed: &[Images],
) -> bool {
    if own.contains(recorded) {
        return true;
    }
    let BackendUri::Rbd { pool, namespace, snapshot: None, conf, id, .. } = recorded else {
        return as_reached_here(recorded, own, listed).is_ok_and(|reached| reached == *recorded);
    };
    let is_listed = listed.iter().any(|images| {
        matches!(images, Images::Pool { pool: p, namespace: n, conf: c, id: i }
            if (p, n, c, i) == (pool, namespace, conf, id))
    });
    let is_known = own.iter().any(|own| {
        matches!(own, BackendUri::Rbd { pool: p, namespace: n, conf: c, id: i, .. }
            if (p, n, c, i) == (pool, namespace, conf, id))
    });
    let is_default = listed.is_empty() && conf.is_none() && id.is_none();
    is_listed || is_known || is_default
}

/// Why such a copy is not touched, and what allows it.
pub(in crate::service) fn not_taken(recorded: &BackendUri) -> String {
    let text = recorded.to_string();
    let option = match recorded {
        BackendUri::Rbd { pool, namespace, .. } => {
            let (pool, namespace) = (pool.clone(), namespace.clone());
            let images = Images::Pool { pool, namespace, conf: None, id: None };
            format!(" (--peer-images {images}{})", text.find('?').map_or("", |at| &text[at..]))
        }
        BackendUri::File { path, .. } => {
            format!(" (--peer-images file:{})", path.parent().unwrap_or(path).display())
        }
        BackendUri::Nbd(_) => String::new(),
    };
    format!(
        "another host has said this way to its image, and this host does not take it{option}; when its owner connects, the copy begins anew in this host's way"
    )
}

/// Looks whether a file is where its path says: a link may lead out of the directory. Blocks.
///
/// # Errors
/// It may not be named. In one line.
pub fn check_place(uri: &BackendUri, own: &[BackendUri], listed: &[Images]) -> Result<(), String> {
    let BackendUri::File { path, .. } = uri else { return Ok(()) };
    if own.iter().any(|own| is_one(own, uri)) {
        return Ok(());
    }
    let directory = path.parent().and_then(|directory| directory.canonicalize().ok());
    let is_below = |listed: &PathBuf| {
        listed
            .canonicalize()
            .is_ok_and(|listed| directory.as_ref().is_some_and(|d| d.starts_with(listed)))
    };
    let is_link = path.symlink_metadata().is_ok_and(|found| found.is_symlink());
    match directories(listed).any(is_below) && !is_link {
        true => Ok(()),
        false => Err(denied(uri, &"file:DIRECTORY")),
    }
}

fn directories(listed: &[Images]) -> impl Iterator<Item = &PathBuf> {
    listed.iter().filter_map(|images| match images {
        Images::Directory(directory) => Some(directory),
        Images::Pool { .. } => None,
    })
}

fn denied(said: &BackendUri, option: &dyn fmt::Display) -> String {
    format!("other hosts may not name {said} here (--peer-images {option})")
}

/// Two URIs are one image by their text, whatever way leads there.
pub(in crate::service) fn is_one(own: &BackendUri, said: &BackendUri) -> bool {
    match (own, said) {
        (BackendUri::File { path: own, .. }, BackendUri::File { path: said, .. }) => own == said,
        (BackendUri::Rbd { snapshot: own_snapshot, .. }, BackendUri::Rbd { snapshot, .. }) => {
            own_snapshot == snapshot && own.rbd_image() == said.rbd_image()
        }
        _ => own == said,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reached(said: &str, own: &[&str], listed: &[&str]) -> Result<String, String> {
        let own: Vec<BackendUri> = own.iter().map(|uri| uri.parse().expect("a URI")).collect();
        let listed: Vec<Images> =
            listed.iter().map(|images| images.parse().expect("images")).collect();
        let uri = as_reached_here(&said.parse().expect("a URI"), &own, &listed)?;
        check_place(&uri, &own, &listed).map(|()| uri.to_string())
    }

    #[test]
    fn an_image_is_reached_in_this_hosts_own_way() {
        let said = "rbd:vms/vm1?conf=/tmp/theirs.conf&id=theirs";
        for (own, listed, wanted) in [
            (&[][..], &[][..], "rbd:vms/vm1"),
            (&["rbd:vms/vm1?id=ours"], &[], "rbd:vms/vm1?id=ours"),
            (&["rbd:vms/vm2?id=ours"], &[], "rbd:vms/vm1?id=ours"),
            (&["rbd:vms/ns/vm2?id=ours", "rbd:vms/vm1@snap?id=snap"], &["rbd:vms"], "rbd:vms/vm1"),
            (&["rbd:vms/vm2?id=ours"], &["rbd:vms?id=h2"], "rbd:vms/vm1?id=h2"),
            (
                &[],
                &["rbd:other", "rbd:vms?conf=/etc/ceph/b.conf"],
                "rbd:vms/vm1?conf=/etc/ceph/b.conf",
            ),
        ] {
            assert_eq!(reached(said, own, listed).as_deref(), Ok(wanted));
        }
        assert_eq!(
            reached("rbd:vms/ns/vm1?id=x", &[], &["rbd:vms/ns"]).as_deref(),
            Ok("rbd:vms/ns/vm1")
        );
    }

    #[test]
    fn what_is_not_allowed_is_refused() {
        for (said, listed) in [
            ("rbd:secret/vm1", &["rbd:vms"][..]),
            ("rbd:vms/vm1", &["rbd:vms/ns"]),
            ("rbd:vms/ns/vm1", &["rbd:vms"]),
            ("rbd:vms/vm1", &["file:/srv"]),
            ("rbd:vms/vm1@snap", &[]),
            ("file:/etc/shadow", &[]),
            ("file:/etc/shadow", &["file:/srv"]),
            ("nbd://evil.example/x", &["rbd:vms"]),
            ("nbd+unix:///x?socket=/run/other.sock", &[]),
        ] {
            let told = reached(said, &[], listed).expect_err(said);
            assert!(told.contains("may not name") && !told.contains('\n'), "{told}");
        }
        assert!(
            reached("rbd:vms/vm1", &[], &["rbd:secret"])
                .expect_err("denied")
                .contains("--peer-images rbd:vms")
        );
    }

    #[test]
    fn a_file_is_one_below_the_directory_whatever_links_there_are() {
        let place = tempfile::tempdir().expect("a directory");
        let at = |name: &str| place.path().join(name).display().to_string();
        for directory in ["images", "images/below", "images-too", "elsewhere"] {
            std::fs::create_dir(at(directory)).expect("a directory");
        }
        std::fs::write(at("elsewhere/vm"), "").expect("a file");
        std::os::unix::fs::symlink(at("elsewhere"), at("images/out")).expect("a link");
        std::os::unix::fs::symlink(at("elsewhere/vm"), at("images/link")).expect("a link");
        let listed = [format!("file:{}", at("images"))];
        let listed: Vec<&str> = listed.iter().map(String::as_str).collect();
        let of = |name: &str| reached(&format!("file:{}", at(name)), &[], &listed);
        assert_eq!(of("images/vm"), Ok(format!("file:{}", at("images/vm"))));
        assert!(of("images/below/vm").is_ok());
        let gated = format!("file:{}?gate=/tmp/x&emulate=hdd", at("images/vm"));
        assert_eq!(reached(&gated, &[], &listed), of("images/vm"), "neither is a gate");
        for name in
            ["images/../elsewhere/vm", "images/out/vm", "images/link", "images-too/vm", "vm"]
        {
            assert!(of(name).is_err(), "{name}");
        }
    }

    #[test]
    fn a_way_that_was_written_down_is_taken_if_it_is_this_hosts() {
        for (recorded, own, listed, taken) in [
            ("rbd:vms/vm1", &[][..], &[][..], true),
            ("rbd:vms/vm1?id=theirs", &[], &[], false),
            ("rbd:vms/vm1?id=ours", &["rbd:vms/vm2?id=ours"], &[], true),
            ("rbd:vms/vm1?id=ours", &["rbd:vms/vm2?id=ours"], &["rbd:vms"], true),
            ("rbd:vms/vm1?id=ours", &["rbd:vms/ns/vm2?id=ours"], &[], false),
            // Any of several will do.
            ("rbd:vms/vm1?id=b", &[], &["rbd:vms?id=a", "rbd:vms?id=b"], true),
            ("rbd:vms/vm1", &["rbd:vms/vm2?id=ours"], &[], true),
            ("rbd:vms/vm1", &[], &["rbd:vms?id=a"], false),
            ("rbd:vms/vm1?conf=/tmp/c&id=a", &[], &["rbd:vms?id=a"], false),
            ("rbd:secret/vm1", &[], &["rbd:vms"], false),
            ("rbd:vms/vm1@snap", &[], &[], false),
            ("file:/srv/vm1", &[], &["file:/srv"], true),
            ("file:/srv/vm1?gate=/tmp/x", &[], &["file:/srv"], false),
            ("file:/srv/vm1?gate=/tmp/x", &["file:/srv/vm1?gate=/tmp/x"], &[], true),
            ("file:/srv/../etc/shadow", &[], &["file:/srv"], false),
            ("file:/srv/vm1", &[], &[], false),
            ("nbd://evil.example/x", &[], &["rbd:vms"], false),
        ] {
            let own: Vec<BackendUri> = own.iter().map(|uri| uri.parse().expect("a URI")).collect();
            let all: Vec<Images> =
                listed.iter().map(|images| images.parse().expect("images")).collect();
            let uri: BackendUri = recorded.parse().expect("a URI");
            assert_eq!(
                is_way_of_this_host(&uri, &own, &all),
                taken,
                "{recorded} {own:?} {listed:?}"
            );
            // What is told to do does it.
            let told = not_taken(&uri);
            if matches!(&uri, BackendUri::Rbd { snapshot: None, .. }) {
                let option =
                    told.split("--peer-images ").nth(1).and_then(|rest| rest.split(')').next());
                let option: Images = option.expect("an option").parse().expect("images");
                assert!(is_way_of_this_host(&uri, &[], &[option]), "{told}");
            }
        }
    }

    #[test]
    fn what_names_no_images_is_refused() {
        for text in [
            "",
            "rbd:",
            "rbd:a/b/c",
            "rbd:a@s",
            "file:relative",
            "file:/a/../b",
            "nbd://h/x",
            "rbd:a?x=1",
        ] {
            assert!(text.parse::<Images>().is_err(), "{text}");
        }
        assert_eq!("rbd:a/b?id=x".parse::<Images>().expect("images").to_string(), "rbd:a/b");
    }
}

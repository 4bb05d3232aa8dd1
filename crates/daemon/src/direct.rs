//! How an image is used without the cache.

use tidepool_backend::BackendUri;

/// Commands that use the image directly, one per line.
pub fn commands(uri: &BackendUri) -> Vec<String> {
    match uri {
        BackendUri::File { path, .. } => {
            let path = path.to_string_lossy();
            vec![drive(&path.replace(',', ",,"))]
        }
        BackendUri::Rbd { pool, namespace, image, snapshot, conf, id } => {
            let names: Vec<&str> = [pool, namespace, image]
                .into_iter()
                .map(String::as_str)
                .filter(|n| !n.is_empty())
                .collect();
            let mut options = String::new();
            let mut flags = String::new();
            if let Some(id) = id {
                options.push_str(&format!(":id={}", escaped(id)));
                flags.push_str(&format!(" --id {}", quoted(id)));
            }
            if let Some(conf) = conf {
                let conf = conf.to_string_lossy();
                options.push_str(&format!(":conf={}", escaped(&conf)));
                flags.push_str(&format!(" --conf {}", quoted(&conf)));
            }
            let escaped_names: Vec<String> = names.iter().map(|name| escaped(name)).collect();
            let at = snapshot.as_ref().map(|snapshot| format!("@{snapshot}")).unwrap_or_default();
            let source = format!("rbd:{}{at}{options}", escaped_names.join("/"));
            let info =
                format!("rbd{flags} info {}", quoted(&(uri.rbd_image().unwrap_or_default() + &at)));
            vec![drive(&source.replace(',', ",,")), info]
        }
        BackendUri::Nbd(uri) => {
            let uri = uri.to_string();
            vec![drive(&uri.replace(',', ",,")), format!("nbdinfo {}", quoted(&uri))]
        }
    }
}

fn drive(file: &str) -> String {
    format!(
        "qemu-system-x86_64 … -drive {}",
        quoted(&format!("file={file},format=raw,if=virtio,cache=none"))
    )
}

/// Protects what QEMU's `rbd:` syntax would take for structure.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if matches!(c, ':' | '@' | '/' | '=' | '\\') && !(c == '/' && text.starts_with('/')) {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

/// A word of a shell.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:=,+@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(uri: &str) -> Vec<String> {
        commands(&uri.parse().expect(uri))
    }

    #[test]
    fn a_file_is_given_to_qemu_as_a_raw_drive() {
        assert_eq!(
            of("file:/images/vm1.img?emulate=hdd"),
            ["qemu-system-x86_64 … -drive file=/images/vm1.img,format=raw,if=virtio,cache=none"]
        );
        assert_eq!(
            of("file:/a b,c"),
            ["qemu-system-x86_64 … -drive 'file=/a b,,c,format=raw,if=virtio,cache=none'"]
        );
    }

    #[test]
    fn an_export_is_given_to_qemu_by_its_uri() {
        assert_eq!(
            of("nbd+unix:///disk?socket=/run/s"),
            [
                "qemu-system-x86_64 … -drive 'file=nbd+unix:///disk?socket=/run/s,format=raw,if=virtio,cache=none'",
                "nbdinfo 'nbd+unix:///disk?socket=/run/s'",
            ]
        );
    }

    #[test]
    fn an_rbd_image_keeps_its_namespace_user_and_configuration() {
        assert_eq!(
            of("rbd:rbd/tenant/vm1?id=libvirt&conf=/etc/ceph/b.conf"),
            [
                "qemu-system-x86_64 … -drive file=rbd:rbd/tenant/vm1:id=libvirt:conf=/etc/ceph/b.conf,format=raw,if=virtio,cache=none",
                "rbd --id libvirt --conf /etc/ceph/b.conf info rbd/tenant/vm1",
            ]
        );
    }
}

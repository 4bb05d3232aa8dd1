//! Images that the kernel of a guest maps (`/dev/rbdN`).

use std::path::Path;
use std::time::Duration;

use tidepool_testkit::Cluster;
use tidepool_testkit::guest::Guest;

const MINUTE: Duration = Duration::from_secs(60);

/// What the guest's kernel needs for its RBD client and its network.
pub const MODULES: [&str; 2] = ["virtio_net", "rbd"];

/// The monitor's address for the kernel, which speaks the first version of the protocol unless told
/// otherwise.
fn monitor(conf: &Path) -> String {
    let text = std::fs::read_to_string(conf).expect("a configuration");
    let (_, address) = text.split_once("v1:").expect("an address");
    address.split([']', ',', '\n']).next().expect("it ends").trim().to_string()
}

/// Maps an image as the next `/dev/rbdN`; what the guest's shell said, and how it ended. The
/// options begin with a comma.
pub fn map(guest: &mut Guest, cluster: &Cluster, image: &str, options: &str) -> (String, i32) {
    let options = format!("name=admin,mount_timeout=30,osd_request_timeout=60{options}");
    let monitor = monitor(cluster.conf());
    let line = format!("echo '{monitor} {options} rbd {image} -' >/sys/bus/rbd/add_single_major");
    guest.run_status(&line, 3 * MINUTE).expect("the guest answers")
}

/// Unmaps `/dev/rbdN`.
pub fn unmap(guest: &mut Guest, number: u32) {
    guest
        .run(&format!("echo {number} >/sys/bus/rbd/remove_single_major"), MINUTE)
        .expect("unmapped");
}

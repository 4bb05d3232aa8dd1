//! Brings a throw-away cluster up, prints the path of its ceph.conf, and takes it down at the end
//! of its input.
//!
//! Arguments: the number of OSDs, and any of `cephx`, `replicas=N`, `servers=N`, `delay-us=N`.

use std::io::Read;
use std::time::Duration;

use tidepool_cluster::ceph::Servers;
use tidepool_cluster::{Cluster, ClusterOptions};

fn main() {
    let osds = std::env::args().nth(1).and_then(|word| word.parse().ok()).unwrap_or(1);
    let number =
        |name: &str| std::env::args().find_map(|word| word.strip_prefix(name)?.parse::<u32>().ok());
    let options = ClusterOptions {
        cephx: std::env::args().any(|word| word == "cephx"),
        replicas: number("replicas=").unwrap_or(1),
        servers: number("servers=").map(Servers::new),
        delay: number("delay-us=").map(|us| Duration::from_micros(us.into())),
        prompt: true,
        manager: false,
        ..ClusterOptions::with_osds(osds)
    };
    let start = std::time::Instant::now();
    match Cluster::up(&options) {
        Ok(cluster) => {
            eprintln!("up after {:.1} s", start.elapsed().as_secs_f64());
            if let Some(network) = cluster.network() {
                eprintln!("nsenter --net=/proc/{}/ns/net", network.client().id());
            }
            println!("{}", cluster.conf().display());
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
        }
        Err(error) => {
            eprintln!("error: {error}");
            std::process::exit(1);
        }
    }
}

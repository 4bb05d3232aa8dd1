//! Brings a throw-away cluster up, prints the path of its ceph.conf, and takes it down at the end of its input.

use std::io::Read;

fn main() {
    let osds = std::env::args().nth(1).and_then(|word| word.parse().ok()).unwrap_or(1);
    let cephx = std::env::args().any(|word| word == "cephx");
    let options = tidepool_lab::ClusterOptions { cephx, ..tidepool_lab::ClusterOptions::with_osds(osds) };
    let start = std::time::Instant::now();
    match tidepool_lab::Cluster::up(&options) {
        Ok(cluster) => {
            eprintln!("up after {:.1} s", start.elapsed().as_secs_f64());
            println!("{}", cluster.conf().display());
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
        }
        Err(error) => {
            eprintln!("error: {error}");
            std::process::exit(1);
        }
    }
}

//! An NBD server whose volume is memory, or nothing at all: what remains is the front door. For
//! measurements and for trying clients out.
//!
//!     memory_server SOCKET SIZE_MIB [null] [shuffle=SEED] [bad=BYTE] [arena=MIB]

use std::os::unix::net::UnixListener;
use tidepool_daemon::shard::memory::{MemoryCore, MemoryOptions, NoBackend};
use tidepool_daemon::shard::{Image, Opened, start_with};
use tidepool_engine::api::{Degraded, Mode, VolumeSpec};
use tidepool_replica::Limits;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let socket = args.next().ok_or("the path of a socket is missing")?;
    let size_mib: u64 = args.next().ok_or("the size in MiB is missing")?.parse()?;
    let mut options = MemoryOptions { arena_bytes: 64 << 20, ..MemoryOptions::default() };
    for arg in args {
        match arg.split_once('=') {
            None if arg == "null" => options.null = true,
            Some(("shuffle", seed)) => options.shuffle = seed.parse()?,
            Some(("bad", byte)) => options.bad_byte = Some(byte.parse()?),
            Some(("arena", mib)) => options.arena_bytes = mib.parse::<usize>()? << 20,
            _ => return Err(format!("unknown argument {arg}").into()),
        }
    }
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let shard = start_with(None, Limits::SHIPPED, move || {
        Ok((MemoryCore::new(options), None, Opened::default()))
    })?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let spec = VolumeSpec {
            name: "memory".into(),
            backend: String::new(),
            size_bytes: size_mib << 20,
            mode: Mode::WriteBack,
            drain: tidepool_engine::api::DrainOrder::Unordered,
            dirty_bytes_max: 0,
            read_only: false,
            generation: 1,
            attachment: Vec::new(),
        };
        shard.add_volume(spec, Image::new(Box::new(NoBackend::new()?)), Degraded::No).await?;
        let listener = UnixListener::bind(&socket)?;
        shard.listen(listener.into(), None).await?;
        println!("ready");
        tokio::signal::ctrl_c().await?;
        let status = shard.status().await?;
        let stopped = shard.shutdown().await?;
        stopped.outcome?;
        std::fs::remove_file(&socket)?;
        eprintln!("{:?}", status.reactor);
        for volume in status.volumes {
            for (what, h) in [
                ("read", volume.read_latency),
                ("write", volume.write_latency),
                ("flush", volume.flush_latency),
            ] {
                eprintln!(
                    "{what}: {} requests, p50 {} ns, p99 {} ns",
                    h.len(),
                    h.value_at_quantile(0.5),
                    h.value_at_quantile(0.99)
                );
            }
        }
        Ok(())
    })
}

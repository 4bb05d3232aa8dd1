//! A network for a cluster on one machine: its nodes are network namespaces, joined by cables to a
//! switch.
//!
//! A child process that does nothing holds each namespace. Without a delay, a cable is a veth pair,
//! and the switch is a bridge in a namespace of its own. With a delay, the switch is a thread of
//! this process. Nothing of the network is ever in the machine's own namespace, and nothing has a
//! name in the filesystem. When the process that made the network ends, however it ends, its
//! children end, and the kernel removes the namespaces with all they hold.

use std::fs::File;
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::process::{self, Process};
use crate::switch::{self, Switch};

pub use crate::switch::Transit;

/// Most servers in a network.
pub const SERVERS_MAX: u32 = 16;
/// The name of a node's interface to the switch.
pub const LINK: &str = "eth0";
/// The name of the bridge that joins that interface to guests on the node.
const GUESTS: &str = "guests";
/// A MAC address that no network card has.
const NOBODY: &str = "02:00:00:00:00:01";
/// The first three bytes of all addresses. Each network has namespaces of its own, so every network
/// has the same addresses.
const SUBNET: [u8; 3] = [10, 213, 0];
/// The last bytes of the addresses of the client, the monitor, the client's peer, and the first
/// server; the other servers follow.
const CLIENT: u8 = 2;
const MONITOR: u8 = 3;
const PEER: u8 = 4;
const SERVER: u8 = 10;
/// The last byte of the first guest's address, which the other guests follow; and the most guests.
const GUEST: u8 = 100;
const GUESTS_MAX: u8 = 100;

/// Why there is no network, or why it cannot be changed.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// A namespace cannot be made, in most cases because the user is not root.
    #[error("cannot make a network namespace: {0}")]
    Namespace(io::Error),
    /// An interface for a network with a delay cannot be made.
    #[error("cannot make a network interface with /dev/net/tun: {0}")]
    Interface(io::Error),
    /// The program `ip` cannot be run.
    #[error("cannot run `ip`: {0}; on Debian: apt-get install iproute2")]
    Program(io::Error),
    /// The program `ip` failed.
    #[error("cannot lay the cables of a network: {0}")]
    Cables(String),
    /// That number of servers is not possible.
    #[error("a network of {0} servers is not possible: use 1 to {SERVERS_MAX}")]
    Servers(u32),
    /// A delay was asked for, but there is no network, or it came up without a delay.
    #[error("a delay needs a network: say how many servers there are")]
    None,
    /// There are more guests than addresses for guests.
    #[error("a network has at most {GUESTS_MAX} guests")]
    Guests,
    /// An OSD is assigned to a server that does not exist.
    #[error("there is no server {0}; the first one is 0")]
    NoServer(u32),
}

/// A network namespace. It exists as long as a clone of this value exists, or a process in it.
#[derive(Debug, Clone)]
pub struct Namespace(Arc<File>);

impl Namespace {
    /// Makes `command` start in this namespace. There is no process between this process and the
    /// command, so a parent-death signal ([`crate::process`]) works as without a namespace.
    pub fn enter(&self, command: &mut Command) {
        let namespace = Arc::clone(&self.0);
        // SAFETY: between fork and exec only one async-signal-safe system call is made, and nothing
        // is allocated. The file is open as long as the command keeps the closure.
        unsafe {
            command.pre_exec(move || {
                Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
            });
        }
    }

    /// Calls `what` in this namespace, on a thread of its own. Threads that `what` starts are in
    /// the namespace, too.
    ///
    /// # Errors
    /// When no thread can be started, or the thread may not enter the namespace.
    pub fn within<T: Send>(&self, what: impl FnOnce() -> T + Send) -> std::io::Result<T> {
        let inside = || {
            move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(what())
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().spawn_scoped(scope, inside)?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

/// A node: one of the machines that the network stands for.
#[derive(Debug)]
pub struct Node {
    name: String,
    address: Ipv4Addr,
    namespace: Namespace,
    holder: Process,
    /// Whether the node's interface is joined to guests.
    has_guests: AtomicBool,
}

/// A place for a guest's network card on a node. Frames go to other guests on the node directly,
/// and to other nodes through the node's cable.
#[derive(Debug, Clone)]
pub struct Plug {
    /// The TAP device in the node's namespace. The guest's card is its other end.
    pub interface: String,
    /// The card's MAC address.
    pub mac: String,
    /// The guest's address.
    pub address: Ipv4Addr,
    /// The node's namespace.
    pub namespace: Namespace,
}

impl Node {
    /// Makes a node: starts the process that holds the node's new namespace.
    fn new(name: String, host: u8) -> Result<Node, NetworkError> {
        let mut command = Command::new("sleep");
        command.arg("infinity").current_dir("/");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: between fork and exec only one async-signal-safe system call is made, and nothing
        // is allocated. The call does not unshare the table of file descriptors.
        unsafe {
            command.pre_exec(|| Ok(unshare_unsafe(UnshareFlags::NEWNET)?));
        }
        let holder = Process::spawn(command).map_err(NetworkError::Namespace)?;
        // The child has called exec by now, so it is in its namespace.
        let file =
            File::open(format!("/proc/{}/ns/net", holder.id())).map_err(NetworkError::Namespace)?;
        let address = Ipv4Addr::new(SUBNET[0], SUBNET[1], SUBNET[2], host);
        Ok(Node {
            name,
            address,
            namespace: Namespace(Arc::new(file)),
            holder,
            has_guests: AtomicBool::new(false),
        })
    }

    /// The node's name: `client`, `mon`, `node0`, `node1` and so on, and `peer`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The node's address.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// The node's namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The id of the process that holds the namespace. `nsenter --net=/proc/ID/ns/net` leads there.
    pub fn id(&self) -> u32 {
        self.holder.id()
    }

    /// The table of the node's interfaces, in the format of `/proc/net/dev`. Each read from its
    /// start returns new figures.
    ///
    /// # Errors
    /// When the process that holds the node has been killed.
    pub fn interfaces(&self) -> io::Result<File> {
        File::open(format!("/proc/{}/net/dev", self.holder.id()))
    }

    /// Runs `ip` in the node's namespace, with a command on each line of `lines`.
    fn ip(&self, lines: &str) -> Result<(), NetworkError> {
        let mut command = Command::new("ip");
        command.args(["-batch", "-"]);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        self.namespace.enter(&mut command);
        let mut ip = process::spawn(command).map_err(NetworkError::Program)?;
        let mut input = ip.stdin.take().expect("the input is piped");
        // If `ip` ends before it has read all of its input, its status says more than the broken
        // pipe.
        let _ = input.write_all(lines.as_bytes());
        drop(input);
        let output = Child::wait_with_output(ip).map_err(NetworkError::Program)?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().next().unwrap_or("`ip` does not say why");
        Err(NetworkError::Cables(said.to_string()))
    }
}

/// The place of a machine in a network.
#[derive(Debug, Clone)]
pub struct HostNode {
    /// The machine's namespace.
    pub namespace: Namespace,
    /// The machine's address.
    pub address: Ipv4Addr,
}

impl HostNode {
    /// The place of a node.
    pub fn of(node: &Node) -> HostNode {
        HostNode { namespace: node.namespace().clone(), address: node.address() }
    }
}

/// A client, a monitor's machine, servers for OSDs and perhaps a second host for clients, joined by
/// a switch. Dropping it removes all of them.
#[derive(Debug)]
pub struct Network {
    delay: Option<Duration>,
    /// What joins the nodes: a node with a bridge, to which one end of each cable is tied, or a
    /// switch that delays frames.
    bridge: Option<Node>,
    switch: Option<Switch>,
    /// The client, the monitor, the servers and the client's peer, in this order.
    nodes: Vec<Node>,
    /// Number of servers among the nodes.
    servers: usize,
}

impl Network {
    /// Checks whether networks are possible on this machine, with a delay or without. The error
    /// says on one line why not.
    ///
    /// # Errors
    /// Those of [`Network::up`].
    pub fn available(delay: Option<Duration>) -> Result<(), NetworkError> {
        Network::up(1, false, delay).map(drop)
    }

    /// Makes a network with this number of servers, and with a second host for clients if `peer` is
    /// true. With a `delay`, each frame takes that long from one node to another.
    ///
    /// # Errors
    /// When the user may not make namespaces and interfaces, or `ip` is not installed.
    pub fn up(servers: u32, peer: bool, delay: Option<Duration>) -> Result<Network, NetworkError> {
        if !(1..=SERVERS_MAX).contains(&servers) {
            return Err(NetworkError::Servers(servers));
        }
        let mut nodes =
            vec![Node::new("client".into(), CLIENT)?, Node::new("mon".into(), MONITOR)?];
        for number in 0..servers as u8 {
            nodes.push(Node::new(format!("node{number}"), SERVER + number)?);
        }
        if peer {
            nodes.push(Node::new("peer".into(), PEER)?);
        }
        let (bridge, switch) = match delay {
            None => (Some(bridge(&nodes)?), None),
            Some(delay) => (None, Some(switch(&nodes, delay)?)),
        };
        for node in &nodes {
            let address = node.address;
            node.ip(&format!(
                "link set lo up\naddress add {address}/24 dev {LINK}\nlink set {LINK} up\n"
            ))?;
        }
        Ok(Network { delay, bridge, switch, nodes, servers: servers as usize })
    }

    /// A description of the network, for a report.
    pub fn describe(&self) -> String {
        let hosts = if self.peer().is_some() { "a client, its peer" } else { "a client" };
        let nodes = format!(
            "{hosts}, a monitor and {} servers in namespaces of one machine",
            self.servers().len()
        );
        match self.delay.map(|delay| delay.as_micros()) {
            None => format!("{nodes}, with no delay between them but the machine's own"),
            Some(us) => {
                format!(
                    "{nodes}; each packet is {us} µs on its way from one to another, and never less"
                )
            }
        }
    }

    /// The frames between nodes since the network came up, and the time that they took; `None` in a
    /// network without a delay, in which no switch of this process carries frames.
    pub fn transit(&self) -> Option<Transit> {
        Some(self.switch.as_ref()?.transit())
    }

    /// Sets the time that each frame takes from now on.
    ///
    /// # Errors
    /// The network came up without a delay, so no switch of this process carries its frames.
    pub fn set_delay(&self, delay: Duration) -> Result<(), NetworkError> {
        self.switch.as_ref().ok_or(NetworkError::None)?.set_delay(delay);
        Ok(())
    }

    /// The first node for clients.
    pub fn client(&self) -> &Node {
        &self.nodes[0]
    }

    /// The node of the monitor and the manager.
    pub fn monitor(&self) -> &Node {
        &self.nodes[1]
    }

    /// The nodes of OSDs.
    pub fn servers(&self) -> &[Node] {
        &self.nodes[2..2 + self.servers]
    }

    /// The nodes for clients: the client, and its peer if there is one.
    pub fn hosts(&self) -> impl Iterator<Item = &Node> {
        std::iter::once(self.client()).chain(self.peer())
    }

    /// The second node for clients, if there is one.
    pub fn peer(&self) -> Option<&Node> {
        self.nodes.get(2 + self.servers)
    }

    /// All nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Plugs a node's cable into the switch, or pulls it out. While it is out, frames to and from
    /// the node are lost without an error.
    ///
    /// # Errors
    /// The network has a delay, and so no cables; or `ip` fails.
    pub fn plug(&self, node: &Node, plugged: bool) -> Result<(), NetworkError> {
        let no_cables = || NetworkError::Cables("a network with a delay has none".into());
        let bridge = self.bridge.as_ref().ok_or_else(no_cables)?;
        bridge.ip(&format!("link set {} {}\n", node.name, if plugged { "up" } else { "down" }))
    }

    /// Sets whether packets from one node arrive at another. If not, these packets are lost without
    /// an error; packets in the other direction arrive as before.
    ///
    /// # Errors
    /// `ip` fails.
    pub fn lead(&self, from: &Node, to: &Node, arrives: bool) -> Result<(), NetworkError> {
        let to = to.address;
        from.ip(&if arrives {
            format!("neighbour flush dev {LINK} to {to} nud permanent\n")
        } else {
            format!("neighbour replace {to} lladdr {NOBODY} nud permanent dev {LINK}\n")
        })
    }

    /// Makes a place for a guest on a node. A guest's number is unique in the whole network.
    ///
    /// # Errors
    /// There are no more addresses, or `ip` fails.
    pub fn plug_guest(&self, node: &Node, number: u8) -> Result<Plug, NetworkError> {
        if number >= GUESTS_MAX {
            return Err(NetworkError::Guests);
        }
        let host = GUEST + number;
        let mut lines = String::new();
        if !node.has_guests.swap(true, Ordering::Relaxed) {
            let address = node.address;
            lines += &format!(
                "link add name {GUESTS} type bridge\nlink set {LINK} master {GUESTS}\naddress delete {address}/24 dev {LINK}\n\
                 address add {address}/24 dev {GUESTS}\nlink set {GUESTS} up\n"
            );
        }
        let interface = format!("guest{number}");
        lines += &format!(
            "tuntap add dev {interface} mode tap\nlink set {interface} master {GUESTS}\nlink set {interface} up\n"
        );
        node.ip(&lines)?;
        let [a, b, c] = SUBNET;
        Ok(Plug {
            interface,
            mac: format!("02:00:{a:02x}:{b:02x}:{c:02x}:{host:02x}"),
            address: Ipv4Addr::new(a, b, c, host),
            namespace: node.namespace.clone(),
        })
    }

    /// The network of all nodes' addresses, as `ADDRESS/BITS`.
    pub fn subnet(&self) -> String {
        let [a, b, c] = SUBNET;
        format!("{a}.{b}.{c}.0/24")
    }
}

/// Makes a bridge, and ties a cable from each node to it.
fn bridge(nodes: &[Node]) -> Result<Node, NetworkError> {
    let bridge = Node::new("switch".into(), 0)?;
    let mut lines = "link add name bridge type bridge\nlink set bridge up\n".to_string();
    for node in nodes {
        let (name, id) = (&node.name, node.id());
        lines += &format!("link add name {name} type veth peer name {LINK} netns {id}\n");
        lines += &format!("link set {name} master bridge up\n");
    }
    bridge.ip(&lines)?;
    Ok(bridge)
}

/// Makes a switch that delays frames, and gives each node an interface to it.
fn switch(nodes: &[Node], delay: Duration) -> Result<Switch, NetworkError> {
    let ports = nodes.iter().map(|node| switch::port(&node.namespace.0, LINK));
    let ports = ports.collect::<io::Result<Vec<_>>>().map_err(NetworkError::Interface)?;
    Switch::start(ports, delay).map_err(NetworkError::Interface)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::sync::atomic::AtomicU32;
    use std::time::Instant;

    /// Calls `what` in a node's namespace.
    fn within<T: Send>(node: &Node, what: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                move_into_link_name_space(
                    node.namespace.0.as_fd(),
                    Some(LinkNameSpaceType::Network),
                )
                .expect("the way in");
                what()
            });
            thread.join().expect("a thread")
        })
    }

    /// Sends one byte, and then `bytes`, from the client to the second server and back; returns the
    /// round-trip time of the first byte.
    fn echo(network: &Network, bytes: &[u8]) -> Duration {
        let server = &network.servers()[1];
        let listener = within(server, || TcpListener::bind((server.address(), 7)).expect("a port"));
        let mut stream = within(network.client(), || {
            TcpStream::connect((server.address(), 7)).expect("a connection")
        });
        let (mut other, peer) = listener.accept().expect("a connection");
        assert_eq!(peer.ip(), network.client().address());
        let start = Instant::now();
        let mut first = [1];
        stream.write_all(&first).expect("sent");
        other.read_exact(&mut first).expect("received");
        other.write_all(&first).expect("sent");
        stream.read_exact(&mut first).expect("received");
        let took = start.elapsed();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                io::copy(&mut (&other).take(bytes.len() as u64), &mut &other).expect("copied")
            });
            scope.spawn(|| (&stream).write_all(bytes).expect("sent"));
            let mut back = vec![0; bytes.len()];
            (&stream).read_exact(&mut back).expect("received");
            assert!(back == bytes, "the bytes are the same");
        });
        took
    }

    /// Whether networks are possible; prints why not.
    fn possible() -> bool {
        let why = Network::available(Some(Duration::ZERO)).err();
        why.iter().for_each(|why| println!("skipped: {why}"));
        why.is_none()
    }

    #[test]
    fn nodes_reach_each_other_and_leave_nothing() {
        if !possible() {
            return;
        }
        let bytes: Vec<u8> =
            (0..16u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for delay in [None, Some(Duration::ZERO), Some(Duration::from_millis(20))] {
            let network = Network::up(3, true, delay).expect("a network");
            assert!(echo(&network, &bytes) >= delay.unwrap_or_default() * 2);
            let ids: Vec<u32> = network.nodes().iter().map(Node::id).collect();
            let interfaces = std::fs::read_to_string("/proc/net/dev").expect("interfaces");
            assert!(
                !interfaces.contains("node0") && !interfaces.contains("bridge"),
                "{interfaces}"
            );
            drop(network);
            assert!(ids.iter().all(|id| !std::path::Path::new(&format!("/proc/{id}")).exists()));
        }
    }

    /// Whether a packet from `from` arrives at `to` within the socket's timeout. Earlier packets
    /// may arrive at any time.
    fn hears(from: &UdpSocket, to: &UdpSocket) -> bool {
        static SENT: AtomicU32 = AtomicU32::new(0);
        let number = SENT.fetch_add(1, Ordering::Relaxed).to_le_bytes();
        // An error about an address that does not answer is returned by the next call.
        let _ = from.send_to(&number, to.local_addr().expect("an address"));
        let mut heard = [0; 4];
        while to.recv(&mut heard).is_ok() {
            if heard == number {
                return true;
            }
        }
        false
    }

    /// Asserts that no packet from `from` arrives at `to`; or, with `arrives`, that one does within
    /// a minute. One timeout of the socket may be too short for that on a busy machine.
    #[track_caller]
    fn assert_arrives(from: &UdpSocket, to: &UdpSocket, arrives: bool) {
        let start = Instant::now();
        while hears(from, to) != arrives {
            assert!(
                arrives && start.elapsed() < Duration::from_secs(60),
                "whether it arrives should be {arrives}"
            );
        }
    }

    #[test]
    fn a_cable_is_pulled_and_one_direction_is_lost() {
        if !possible() {
            return;
        }
        let network = Network::up(2, false, None).expect("a network");
        let [one, other] = [&network.servers()[0], &network.servers()[1]];
        let socket = |node: &Node| {
            let socket = within(node, || UdpSocket::bind((node.address(), 7)).expect("a port"));
            socket.set_read_timeout(Some(Duration::from_millis(300))).expect("a limit");
            socket
        };
        let (here, there) = (socket(one), socket(other));
        let arrive = |there_does: bool, back_does: bool| {
            assert_arrives(&here, &there, there_does);
            assert_arrives(&there, &here, back_does);
        };
        arrive(true, true);
        for _ in 0..2 {
            network.lead(one, other, false).expect("one way");
            arrive(false, true);
            network.lead(one, other, true).expect("both ways");
            arrive(true, true);
            network.lead(other, one, false).expect("the other way");
            arrive(true, false);
            network.lead(other, one, true).expect("both ways");
            network.plug(one, false).expect("pulled");
            arrive(false, false);
            network.plug(one, true).expect("plugged in");
            arrive(true, true);
        }
        let slow = Network::up(1, false, Some(Duration::ZERO)).expect("a network");
        assert!(matches!(slow.plug(slow.client(), false), Err(NetworkError::Cables(_))));
    }

    #[test]
    fn what_a_network_is_can_be_told() {
        assert!(matches!(Network::up(0, false, None), Err(NetworkError::Servers(0))));
        if !possible() {
            return;
        }
        let told = |delay| Network::up(2, false, delay).expect("a network").describe();
        assert!(
            told(None).contains("2 servers") && told(None).contains("no delay"),
            "{}",
            told(None)
        );
        assert!(told(Some(Duration::from_micros(250))).contains("250 µs"));
    }
}

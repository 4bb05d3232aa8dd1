//! What is shipped for managers of hosts (packaging/ha), with stand-ins for their programs: a host
//! that is not fenced keeps its volume, and the volume of one that is comes here.

use super::failover::{goes_on, holder, record};
use super::*;
use std::time::{SystemTime, UNIX_EPOCH};
use tidepool_tests::failover::{Ended, Manager};

/// Statuses of an OCF agent.
const OCF_SUCCESS: i32 = 0;
const OCF_ERR_GENERIC: i32 = 1;
const OCF_NOT_RUNNING: i32 = 7;

/// Pacemaker's state of the cluster, as crm_mon of 2.1 prints it, with what matters in place of its
/// letters.
fn crm_mon(fencing: bool, quorum: bool, node: &str) -> String {
    format!(
        r#"<pacemaker-result api-version="2.25" request="crm_mon -1 --output-as=xml">
  <summary>
    <stack type="corosync" pacemakerd-state="running"/>
    <current_dc present="true" version="2.1.5" name="h1" id="2" with_quorum="{quorum}"/>
    <cluster_options stonith-enabled="{fencing}" symmetric-cluster="true" no-quorum-policy="stop" maintenance-mode="false" stop-all-resources="false"/>
  </summary>
  <nodes>
    <node name="h0" id="1" {node} standby="false" standby_onfail="false" feature_set="3.16.2" shutdown="false" expected_up="true" is_dc="false" resources_running="0" type="member"/>
    <node name="h1" id="2" online="true" pending="false" unclean="false" maintenance="false" standby="false" type="member"/>
  </nodes>
  <resources>
    <resource id="vol" resource_agent="ocf:tidepool:volume"><node name="h0" id="1" cached="true"/></resource>
  </resources>
  <node_attributes><node name="h0"/></node_attributes>
</pacemaker-result>
"#
    )
}

/// States of a node that is not known to be fenced, with what is said of each.
const NOT_FENCED: [(&str, &str); 4] = [
    (r#"online="true" pending="false" unclean="false" maintenance="false""#, "node h0 is online"),
    (r#"online="false" pending="false" unclean="true" maintenance="false""#, "is to be fenced"),
    (r#"online="false" pending="true" unclean="false" maintenance="false""#, "is about to join"),
    (
        r#"online="false" pending="false" unclean="false" maintenance="true""#,
        "was in maintenance mode",
    ),
];
const FENCED: &str = r#"online="false" pending="false" unclean="false" maintenance="false""#;

#[track_caller]
fn ended(ended: &Ended, status: i32, part: &str) {
    assert!(ended.status == status && ended.error.contains(part), "{part}: {ended:?}");
}

/// An owner that is dead, and the host that has the copy.
fn dead_owner(seed: u64) -> (Pair, Workload, usize) {
    let mut pair = hosts(true);
    let mut workload = workload(&pair, seed);
    let to = holder(&pair);
    kill_owner(&mut pair, &mut workload, 200);
    (pair, workload, to)
}

#[test]
fn g6_pacemaker_starts_a_volume_elsewhere_once_it_has_fenced_the_owner() {
    let _turn = one_at_a_time();
    let (mut pair, mut workload, to) = dead_owner(650);
    let manager = Manager::new().expect("a directory");
    let agent = |pair: &Pair, at: usize, action: &str| {
        manager.runs(&pair.hosts[at], "tidepool-volume", &[action], "").expect("it runs")
    };
    let before = record(&pair);
    ended(
        &agent(&pair, to, "start"),
        OCF_ERR_GENERIC,
        "crm_mon does not tell the state of the cluster",
    );
    manager.says("crm_attribute", "true\n").expect("written");
    let cluster = |fencing, quorum, node: &str| {
        manager.says("crm_mon", &crm_mon(fencing, quorum, node)).expect("written");
    };
    for (node, part) in NOT_FENCED {
        cluster(true, true, node);
        let refused = agent(&pair, to, "start");
        ended(&refused, OCF_ERR_GENERIC, part);
        // Pacemaker shows this line, which has to have the reason.
        let last = refused.error.lines().last().unwrap_or_default();
        let shown =
            last.strip_prefix("ocf-exit-reason:tidepool-failover: volume vm is not taken over: ");
        assert!(shown.is_some_and(|shown| shown.contains(part)), "{refused:?}");
    }
    cluster(false, true, FENCED);
    ended(&agent(&pair, to, "start"), OCF_ERR_GENERIC, "fencing is disabled in this cluster");
    cluster(true, false, FENCED);
    ended(&agent(&pair, to, "start"), OCF_ERR_GENERIC, "has no quorum");
    cluster(true, true, FENCED);
    manager.says("crm_attribute", "false\n").expect("written");
    ended(&agent(&pair, to, "start"), OCF_ERR_GENERIC, "startup-fencing");
    manager.says("crm_attribute", "true\n").expect("written");
    manager.configures("nodes", "h0 elsewhere\n").expect("written");
    ended(
        &agent(&pair, to, "start"),
        OCF_ERR_GENERIC,
        "there is no node elsewhere in this cluster",
    );
    manager.configures("nodes", "h7 elsewhere\n").expect("written");
    ended(&agent(&pair, to, "monitor"), OCF_NOT_RUNNING, "");
    ended(&agent(&pair, to, "stop"), OCF_SUCCESS, "");
    assert_eq!(record(&pair), before, "nothing has changed until here");

    ended(&agent(&pair, to, "start"), OCF_SUCCESS, "");
    ended(&agent(&pair, to, "monitor"), OCF_SUCCESS, "");
    ended(&agent(&pair, to, "start"), OCF_SUCCESS, "");
    goes_on(&mut pair, &mut workload, to);
    workload.disconnect().expect("goodbye");

    // A stop without a copy in sync leaves the volume where it is; with one it moves.
    pair.hosts[3 - to].daemon.kill().expect("kill");
    pair.owner().wait_degraded().expect("alone");
    ended(&agent(&pair, to, "stop"), OCF_SUCCESS, "it stays here");
    ended(&agent(&pair, to, "monitor"), OCF_SUCCESS, "");
    pair.hosts[0].daemon.start().expect("it starts");
    pair.owner().wait_sync().expect("in sync again");
    ended(&agent(&pair, to, "stop"), OCF_SUCCESS, "");
    ended(&agent(&pair, to, "monitor"), OCF_NOT_RUNNING, "");
    ended(&agent(&pair, 0, "start"), OCF_SUCCESS, "");
    pair.owner = 0;
    pair.verify(&mut workload).expect("nothing is lost");
    // Where no daemon runs nothing is served, and a start says so.
    pair.hosts[to].daemon.kill().expect("kill");
    ended(&agent(&pair, to, "monitor"), OCF_NOT_RUNNING, "");
    ended(
        &agent(&pair, to, "start"),
        OCF_ERR_GENERIC,
        "ocf-exit-reason:tidepool-failover: cannot reach the daemon",
    );
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs()
}

/// Proxmox's state of HA: that of the owner's node, what its LRM was and how long ago that was
/// said, and a service of it.
fn pvesh(node: &str, lrm: (&str, &str, u64), service: (&str, &str)) -> String {
    let (state, mode, ago) = lrm;
    let manager = serde_json::json!({
        "master_node": "h1",
        "timestamp": now(),
        "node_status": { "h0": node, "h1": "online" },
        "service_status": { "vm:100": { "node": service.0, "state": service.1 } },
    });
    serde_json::json!({
        "manager_status": manager,
        "quorum": { "node": "h1", "quorate": 1 },
        "lrm_status": { "h0": { "state": state, "mode": mode, "timestamp": now() - ago } },
    })
    .to_string()
}

#[test]
fn g6_proxmox_starts_a_vm_elsewhere_once_the_watchdog_of_the_owner_has_fired() {
    let _turn = one_at_a_time();
    let (mut pair, mut workload, to) = dead_owner(651);
    let manager = Manager::new().expect("a directory");
    let hook = |phase: &str| {
        manager.runs(&pair.hosts[to], "proxmox-hookscript", &["100", phase], "").expect("it runs")
    };
    let before = record(&pair);
    ended(&hook("pre-start"), 1, "cannot read the configuration of VM 100");
    let config = format!(
        "args: -blockdev driver=nbd,node-name=d,server.type=unix,server.path=/s,export={VOLUME} -device virtio-blk-pci,drive=d\nname: vm\n"
    );
    manager.says("qm", &config).expect("written");
    let active = ("active", "active", 130);
    for (said, part) in [
        (pvesh("online", active, ("h1", "started")), "node h0 is in state online"),
        (pvesh("maintenance", active, ("h1", "started")), "in state maintenance"),
        (pvesh("fence", active, ("h0", "fence")), "is to be fenced, and is not yet"),
        (
            pvesh("unknown", active, ("h0", "started")),
            "has not recovered vm:100 from node h0 yet (state started)",
        ),
        (pvesh("unknown", active, ("h0", "fence")), "has not recovered vm:100"),
        (
            pvesh("unknown", ("active", "active", 60), ("h1", "started")),
            "its watchdog may not have fired yet",
        ),
        (
            pvesh("unknown", ("wait_for_agent_lock", "active", 999), ("h1", "started")),
            "was not running",
        ),
        (pvesh("unknown", ("active", "restart", 999), ("h1", "started")), "was not running"),
        (
            pvesh("unknown", active, ("h1", "started")).replace("\"quorate\":1", "\"quorate\":0"),
            "not in the quorate",
        ),
        (
            pvesh("unknown", active, ("h1", "started")).replace("\"h0\":", "\"h5\":"),
            "knows no node h0",
        ),
        (
            pvesh("unknown", active, ("h1", "started"))
                .replace("\"node_status\"", "\"disarm\":{\"state\":\"disarmed\"},\"node_status\""),
            "disarmed",
        ),
        ("nonsense".into(), "no JSON object"),
    ] {
        manager.says("pvesh", &said).expect("written");
        ended(&hook("pre-start"), 1, part);
    }
    for phase in ["post-start", "pre-stop", "post-stop"] {
        ended(&hook(phase), 0, "");
    }
    assert_eq!(record(&pair), before, "nothing has changed until here");

    manager.says("pvesh", &pvesh("unknown", active, ("h1", "started"))).expect("written");
    ended(&hook("pre-start"), 0, "");
    ended(&hook("pre-start"), 0, "");
    manager.says("qm", "name: a VM without our volumes\n").expect("written");
    ended(&hook("pre-start"), 0, "");
    goes_on(&mut pair, &mut workload, to);
}

/// A domain with a disk on an export of this socket, beside disks that are none of ours.
fn domain(socket: &std::path::Path) -> String {
    format!(
        "<domain type='kvm'><name>vm</name><devices>
  <disk type='file' device='cdrom'><source file='/iso'/></disk>
  <disk type='network' device='disk'>
    <source protocol='nbd' name='elsewhere'><host transport='unix' socket='/other.sock'/></source>
  </disk>
  <disk type='network' device='disk'>
    <source protocol='nbd'
            name='{VOLUME}'>
      <host transport='unix' socket='{}'/><reconnect delay='60'/>
    </source>
    <target dev='vda' bus='virtio'/>
  </disk>
</devices></domain>",
        socket.display()
    )
}

#[test]
fn g6_libvirt_starts_a_domain_elsewhere_once_somebody_has_confirmed_the_fence() {
    let _turn = one_at_a_time();
    let (mut pair, mut workload, to) = dead_owner(652);
    let manager = Manager::new().expect("a directory");
    let xml = domain(&pair.hosts[to].socket);
    let hook = |operation: &[&str], xml: &str| {
        let arguments = [&["vm"], operation].concat();
        manager.runs(&pair.hosts[to], "libvirt-qemu", &arguments, xml).expect("it runs")
    };
    let before = record(&pair);
    let begin = ["prepare", "begin", "-"];
    ended(&hook(&begin, &xml), 1, "host h0 is not confirmed to be fenced: ");
    manager
        .installs("etc/fenced", "echo \"$1 answers its BMC: power is on\" >&2; exit 1")
        .expect("written");
    ended(&hook(&begin, &xml), 1, "h0 answers its BMC: power is on");
    ended(&hook(&["started", "begin", "-"], &xml), 0, "");
    ended(&hook(&begin, &xml.replace(VOLUME, "another")), 1, "no copy of it is in this cache");
    ended(&hook(&begin, "<domain/>"), 0, "");
    assert_eq!(record(&pair), before, "nothing has changed until here");

    manager.installs("etc/fenced", "[ \"$1\" = h0 ]").expect("written");
    ended(&hook(&begin, &xml), 0, "");
    ended(&hook(&begin, &xml), 0, "");
    // Also where the volume has a socket of its own.
    let own = domain(&pair.hosts[to].socket.with_file_name("own.sock"));
    ended(&hook(&begin, &own), 0, "");
    ended(&hook(&begin, &own.replace(VOLUME, "another")), 1, "no copy of it is in this cache");
    manager.configures("vms", "vm another\n").expect("written");
    ended(&hook(&begin, &xml), 1, "no copy of it is in this cache");
    goes_on(&mut pair, &mut workload, to);
}

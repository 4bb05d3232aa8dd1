//! The numbers of clients that a suite measures, and those that a machine can run.

use super::{Quick, Suite, Tool};

impl Suite {
    /// Most clients that are measured on a machine with this number of processors; `u32::MAX` if
    /// the suite has no limit.
    pub fn clients_max(&self, cpus: usize) -> u32 {
        let most = self.ground.clients_per_processor_max;
        most.map_or(u32::MAX, |most| most.saturating_mul(u32::try_from(cpus).unwrap_or(u32::MAX)))
    }

    /// All numbers of clients of the measured workloads, in ascending order.
    pub fn clients(&self) -> Vec<u32> {
        let measured =
            self.workloads.iter().filter(|workload| !self.without.contains(&workload.name));
        let mut clients: Vec<u32> =
            measured.flat_map(|workload| workload.clients.iter().copied()).collect();
        clients.sort_unstable();
        clients.dedup();
        clients
    }

    /// Images on a cluster: one for each client of a workload with images, and after those one for
    /// each neighbour.
    pub fn images(&self) -> u32 {
        self.images_on(usize::MAX)
    }

    /// The images on a cluster of a machine with this number of processors. Numbers of clients
    /// above [`Suite::clients_max`] do not count.
    pub fn images_on(&self, cpus: usize) -> u32 {
        let most = self.clients_max(cpus);
        let with_images = self.workloads.iter().filter(|workload| workload.tool == Tool::Fio);
        let clients = with_images.flat_map(|workload| workload.clients.iter().copied());
        let clients = clients.filter(|clients| *clients <= most).max().unwrap_or(0);
        clients.saturating_add(self.ground.neighbours_max())
    }

    /// Checks that each number of clients of the quick form is one of a workload's.
    pub(super) fn check_quick_clients(&self) -> Result<(), String> {
        let wanted = self.quick.iter().flat_map(|quick| &quick.clients);
        let known = |clients: &u32| {
            self.workloads.iter().any(|workload| workload.clients.contains(clients))
        };
        match wanted.copied().find(|clients| !known(clients)) {
            Some(clients) => Err(format!("in its quick form: no workload has {clients} clients")),
            None => Ok(()),
        }
    }
}

impl Quick {
    /// The numbers of clients that a workload keeps in the quick form: all of the workload's if the
    /// form names none of them.
    pub(super) fn kept(&self, clients: &[u32]) -> Vec<u32> {
        let kept: Vec<u32> = clients.iter().copied().filter(|n| self.clients.contains(n)).collect();
        if kept.is_empty() { clients.to_vec() } else { kept }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUITE: &str = include_str!("../suites/micron.toml");

    #[test]
    fn a_machine_bears_some_numbers_of_clients_and_has_images_for_those() {
        let suite = Suite::parse("s.toml", SUITE).expect("a suite");
        assert_eq!((suite.clients(), suite.images()), (vec![1, 4, 10, 20, 40], 40));
        let images = |cpus| suite.images_on(cpus);
        assert_eq!([1, 2, 4, 64].map(images), [10, 20, 40, 40]);
        assert_eq!((suite.clients_max(2), suite.clients_max(usize::MAX)), (20, u32::MAX));
        let other = Suite::find("which-side").expect("it comes with the program");
        assert_eq!((other.clients_max(1), other.images_on(1)), (u32::MAX, other.images()));
        let text = serde_json::to_string(&other).expect("plain data");
        assert!(!text.contains("clients_per_processor_max"), "its SHA-256 would be another one");
    }

    #[test]
    fn the_quick_form_keeps_some_numbers_of_clients() {
        let quick = Suite::parse("s.toml", SUITE).expect("a suite").quick();
        let clients = |name: &str| quick.workload(name).expect("it has it").clients.clone();
        assert_eq!((clients("4k-randwrite"), clients("4k-randread")), (vec![1, 20], vec![4]));
        for (from, to, wanted) in [
            ("clients = [1, 20]", "clients = [1, 21]", "no workload has 21 clients"),
            ("clients_per_processor_max = 10", "clients_per_processor_max = 0", "at least 1"),
            ("clients_per_processor_max = 10", "clients_per_processor_max = -1", "line "),
        ] {
            assert!(SUITE.contains(from), "{from}");
            let error =
                Suite::parse("s.toml", &SUITE.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
        }
    }
}

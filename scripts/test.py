#!/usr/bin/env python3
"""Runs every test of the workspace and says where the time went. The last line is `N passed, N failed`, over all test programs; the
exit status is 0 only if nothing failed. Other arguments than these go to cargo: scripts/test.py --package tidepool-engine

    --build-only FILE   compiles, and writes down what there is to run
    --built FILE        runs what is written there, and compiles nothing
    --programs A,B      runs only these test programs
    --all-must-run      a test that says that it cannot run here has failed

The profile is the one of the program that users run: everything is compiled once, and what is tested is what is shipped.

A test with real parts is a process of its own. It waits for clusters and guests most of the time, so several run at once: each has a
weight, and the weights of those that run stay within the machine's capacity. The tests that only compute take what time is left, at
a low priority. All tests that neither stop a part of Ceph nor change what other pools see share one cluster.

A run over its budget says `over budget`, and so does a test that takes long and is not named in SLOW. The change that made it so moves
a test to `make long`, or makes it faster.
"""

import argparse
import heapq
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

# Seconds after compiling, and of one test that is not in SLOW, on two cores.
BUDGET_S = 600
TEST_BUDGET_S = 20
# A test that takes so long hangs.
TEST_MAX_S = 900
# Tests with real parts that run at once, by weight, per core: as many whatever they do, and up to
# so many as long as they leave this share of the cores free.
WEIGHT_PER_CORE = 5
WEIGHT_PER_CORE_MAX = 9
FREE_SHARE = 0.1
# Test programs and tests that are shown as the slowest.
SLOWEST = 20
# A test that says so at the beginning of a line could not do what it is there for.
NOT_RUN = re.compile(r"^(?:not run|not tested|skipped)[:,].*", re.M)
# Most that is said again of a test that failed.
FAILURE_CHARACTERS = 6000
# The packages whose tests start daemons, clusters and guests.
REAL_PARTS = ["tidepool", "tidepool-backend", "tidepool-cluster", "tidepool-lab", "tidepool-testkit", "tidepool-tests"]
# What is compiled differently: the core with its deliberate bugs.
MUTATIONS = ["--package", "tidepool-sim", "--features", "mutations", "--test", "mutations"]
# Programs that the tests run, by cargo's name, and the variable that tells the tests where they
# are.
RUN_BY_TESTS = {"tidepool": "TIDEPOOL_BIN", "tidepool-long-limits": "TIDEPOOL_LONG_LIMITS_BIN"}
CLUSTER = "ceph-cluster"
# The tests of the core copy large devices; the allocator is to keep their memory, or the kernel
# clears it anew for each copy.
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
ENVIRONMENTS = {"engine": KEEP_MEMORY}

# Tests that may take longer than TEST_BUDGET_S, with the seconds that they take; they start first.
SLOW = {
    "hostile: together::g4_g8_all_attacks_at_once_lose_no_link_and_leave_no_copy_behind": 30,
    "hostile: rounds::g8_what_clients_have_done_in_a_round_is_bounded_and_their_neighbours_go_on": 30,
    "guard: table::g6_every_operation_of_ceph_comes_to_what_the_manual_says": 300,
    "tidepool_backend: rbd::tests::ownership_survives_refreshed_handles_races_and_cut_attempts": 270,
    "faulty_disk: every_operation::g1_g7_a_device_operation_that_fails_makes_nothing_wrong_and_nothing_silent": 230,
    "guest: g2_a_guest_rides_out_kills_of_the_daemon_and_finds_its_files_when_it_is_killed_with_it": 200,
    "seeds: g1_g2_g3_g5_g7_g8_hold_in_every_life": 160,
    "ceph: trouble::g8_the_trouble_of_eight_volumes_is_not_that_of_thirteen_others": 160,
    "faulty_disk: killed_at::g2_g3_a_daemon_that_dies_at_any_step_of_a_format_leaves_nothing_that_looks_like_a_cache": 155,
    "mutations: every_deliberate_bug_is_noticed": 155,
    "mutations: every_deliberate_bug_changes_what_the_core_does": 155,
    "mutations: a_comparison_counts_every_field_and_no_name": 155,
    "ceph_failing: g8_a_full_pool_is_named_makes_writes_wait_and_goes_on_when_there_is_room": 140,
    "ceph_failing: g8_in_a_full_pool_what_is_committed_reaches_the_image": 125,
    "daemon: shard::what_was_written_is_there_after_a_restart_and_in_the_image_after_a_drain": 120,
    "snapshot: rollback::g6_a_volume_goes_back_to_a_snapshot_and_nothing_that_was_cached_since_comes_with_it": 70,
    "snapshot: g5_snapshots_under_load_are_exact_and_have_what_was_acknowledged": 120,
    "faulty_disk: power_lost::g3_power_failures_under_load_and_in_recovery_take_nothing_flushed_and_only_a_tail_of_the_rest": 115,
    "full_cache: g8_one_stopped_backend_does_not_stop_another_volume": 115,
    "operations: the_commands_of_the_manual_work_as_they_stand_there": 110,
    "lost_cache: g5_a_destroyed_cache_leaves_a_filesystem_and_a_database_that_recover": 105,
    "pair: network::g6_of_two_that_cannot_hear_each_other_one_serves": 100,
    "pair: zombie::g6_an_owner_that_was_stopped_in_its_drain_writes_nothing_when_it_goes_on": 100,
    "seeds: g4_g6_hold_whatever_happens_to_two_hosts_and_their_link": 100,
    "backend: conformance::g6_the_simulated_cluster_tells_two_owners_what_a_real_one_tells_them": 95,
    "interop: a_disk_image_converted_into_the_volume_is_the_plain_image_after_the_drain": 95,
    "backend: rbd::a_disowned_cache_is_never_believed_again_while_its_process_goes_on_serving": 90,
    "guard: an_image_that_was_written_all_the_same_is_not_drained_over_and_both_sides_are_exported": 90,
    "readme: the_steps_of_the_readme_work_as_they_stand_there": 85,
    "clones: a_boot_storm_fetches_the_golden_image_once": 80,
    "program: export::an_image_that_others_have_changed_is_refused_and_both_sides_are_exported": 80,
    "restarts: g8_clients_that_reconnect_see_no_error_of_ten_restarts": 45,
    "devices: swaps::g6_devices_that_are_swapped_at_random_get_what_is_theirs": 25,
    "backend: rbd::dirty_data_never_goes_over_the_writes_of_others_at_the_second_start_neither": 75,
    "daemon_killed: g2_completed_writes_survive_kills_inside_drain_reclaim_checkpoint_and_replay": 75,
    "program: export::a_cache_that_was_given_up_and_found_again_still_exports_what_verifies": 75,
    "ceph: rights::the_documented_rights_suffice_for_everything": 70,
    "ceph: what_a_guest_trims_is_given_back_to_the_pool": 70,
    "guard: journaled::g1_nobody_changes_a_journaled_image_through_the_handle_of_the_cache_that_owns_it": 60,
    "ceph_failing: g8_with_a_slow_osd_the_drain_goes_on": 70,
    "daemon_killed: g2_unflushed_writes_survive_a_kill": 70,
    "full_cache: g8_a_volume_larger_than_the_cache_is_reclaimed_under_load_without_an_error": 70,
    "lost_cache: g5_a_destroyed_cache_leaves_an_rbd_image_as_it_once_was": 70,
    "pair: ceph::g4_the_peer_of_a_dead_host_goes_on_in_a_moment": 70,
    "pair: ceph::g6_a_host_that_was_not_fenced_after_all_writes_nothing_after_a_failover": 70,
    "ceph_failing: g8_an_osd_that_is_killed_and_started_again_is_waited_for": 65,
    "clones: clones_have_what_was_written_to_them_and_to_nobody_else": 65,
    "corpus: cache_image": 65,
    "pair: ceph::g6_an_owner_that_was_stopped_writes_nothing_when_it_goes_on": 65,
    "torn_tail: g3_what_was_not_flushed_is_lost_only_as_a_tail_of_the_acknowledged_order": 65,
    "ceph: g2_kills_under_load_lose_nothing_on_an_rbd_image": 60,
    "pair: ceph::g4_a_volume_is_handed_over_with_its_lock_and_its_guard": 60,
    "pair: network::g8_behind_a_black_hole_the_next_peer_in_order_gets_the_copy": 60,
    "ceph: rights::check_and_serve_name_the_right_that_is_missing_before_anything_is_touched": 55,
    "ceph: with_a_stopped_osd_the_daemon_ends_in_time_and_the_next_start_takes_the_image_back": 55,
    "ceph_failing: g8_with_a_stopped_osd_hits_go_on_and_writes_wait_at_the_quota_until_it_returns": 55,
    "ceph_failing: g8_without_the_monitor_everything_goes_on": 55,
    "clones: a_golden_image_that_is_replaced_under_its_name_is_another_parent": 55,
    "nbd_backend: g2_daemon_and_server_are_killed_in_turn_and_the_volume_is_given_back": 55,
    "pair: ceph::g4_a_failover_waits_for_a_cluster_that_does_not_answer_for_a_while": 55,
    "pair: ceph::g4_everything_that_a_dead_host_has_served_is_failed_over_at_once": 55,
    "pair: failover::g4_a_failover_that_is_cut_short_is_finished_by_the_next": 55,
    "pair: failover::g8_an_image_that_does_not_answer_holds_up_its_own_volume_alone": 55,
    "pair: g4_a_volume_is_handed_over_and_back_and_nothing_is_lost": 55,
    "pair: migration::g1_a_guest_that_moves_reads_and_writes_what_it_had_written_where_it_was": 55,
    "pair: network::g4_hosts_that_die_while_cables_are_pulled_lose_nothing": 55,
    "program: second_copy::a_copy_that_came_with_tls_is_whole_and_nobody_on_the_way_has_read_it": 55,
    "backend: rbd::transfers_wait_for_a_stopped_osd_and_complete_when_it_goes_on": 50,
    "cluster: osds_run_on_emulated_devices_with_their_databases_on_an_ssd": 50,
    "model: a_single_power_loss_takes_nothing_that_is_acknowledged": 50,
    "pair: failover::g4_a_copy_that_does_not_count_is_not_failed_over": 50,
    "pair: failover::g4_the_volumes_of_a_fenced_host_are_served_by_its_peer_with_everything": 50,
    "pair: failover::g6_a_host_that_is_alive_is_not_failed_over_whatever_is_said_of_its_fence": 50,
    "pair: killed::g4_a_peer_that_dies_while_it_takes_over_takes_nothing_with_it": 50,
    "pair: killed::g4_an_owner_that_dies_while_it_parts_with_a_dead_peer_takes_nothing_with_it": 50,
    "pair: network::g4_cables_that_are_pulled_again_and_again_lose_nothing": 50,
    "program: lab::a_cluster_stays_until_its_holder_ends_and_leaves_nothing": 50,
    "backend: rbd::a_check_tells_what_would_be_done_and_changes_nothing": 45,
    "ceph: a_converted_disk_image_is_what_rbd_export_gives_after_the_drain": 45,
    "full_cache: g8_with_a_stopped_backend_hits_go_on_and_writes_are_absorbed_up_to_the_quota": 45,
    "lost_cache: g5_a_destroyed_cache_leaves_a_file_as_it_once_was": 45,
    "pair: a_volume_that_cannot_be_handed_over_stays_where_it_is": 45,
    "pair: failover::g4_a_host_that_was_restarted_since_loses_nothing_by_itself": 45,
    "pair: failover::what_may_pass_is_tried_again_for_as_long_as_is_said": 45,
    "pair: g4_a_link_that_flaps_loses_nothing": 45,
    "pair: g4_what_was_acknowledged_survives_its_host": 45,
    "pair: g8_without_its_peer_a_volume_goes_on_as_write_through": 45,
    "pair: managers::g6_proxmox_starts_a_vm_elsewhere_once_the_watchdog_of_the_owner_has_fired": 45,
    "ceph: a_killed_daemon_takes_its_image_back_from_its_own_dead_client": 40,
    "device_failed: without_a_backend_a_failed_cache_makes_writes_wait_and_none_fail": 40,
    "model: a_dead_cache_device_takes_nothing_and_nothing_goes_past_it_that_a_takeover_would_lose": 40,
    "nbd_backend: g2_a_server_that_is_killed_under_load_and_forgets_what_was_not_flushed_costs_nothing": 40,
    "network: copies_go_between_servers_and_all_is_counted_where_it_passes": 40,
    "pair: a_volume_with_a_second_copy_is_changed_and_removed_like_any_other": 40,
    "pair: failover::two_that_ask_at_once_are_both_served": 40,
    "pair: g1_a_failed_device_that_comes_back_after_the_two_have_parted_is_not_believed": 40,
    "pair: g4_an_owner_whose_device_had_failed_does_not_go_on_with_less": 40,
    "pair: g8_a_link_that_is_cut_or_swallows_everything_costs_no_request": 40,
    "pair: managers::g6_pacemaker_starts_a_volume_elsewhere_once_it_has_fenced_the_owner": 40,
    "pair: power::g3_both_hosts_lose_their_power_and_only_the_copy_comes_back": 40,
    "program: lab::a_cluster_with_a_network_says_how_it_is_reached_and_goes_when_it_is_told_to": 40,
    "snapshot: volumes_grow_and_shrink_with_their_images": 40,
    "torn_tail: g1_an_old_copy_of_the_cache_is_refused": 40,
    "backend: rbd::an_image_with_its_newest_data_in_a_cache_cannot_be_written_by_others": 35,
    "tidepool_lab: compare::tests::two_runs_of_the_same_thing_are_equal_and_a_true_difference_is_found": 75,
    "tidepool_lab: verdict::campaigns::nothing_shows_that_more_than_one_campaign_of_twenty_names_a_winner_that_is_none": 30,
    "backend: rbd::clean_data_is_kept_only_while_nobody_else_wrote": 35,
    "pair: failover::a_volume_that_arrives_with_a_running_guest_is_no_failover": 35,
    "pair: g1_an_owner_that_is_cut_off_from_everybody_answers_no_reads_until_it_knows": 35,
    "pair: g2_an_owner_that_was_killed_goes_on_where_it_was": 35,
    "pair: killed::g4_a_host_that_dies_while_a_volume_is_handed_over_takes_nothing_with_it": 35,
    "pair: managers::g6_libvirt_starts_a_domain_elsewhere_once_somebody_has_confirmed_the_fence": 35,
    "pair: migration::g1_a_guest_that_moves_to_a_host_without_a_copy_finds_everything_there": 35,
    "ceph: a_removed_volume_is_a_plain_image_that_others_can_write": 30,
    "daemon: shard::one_volume_whose_backend_stands_still_does_not_hold_the_memory_of_another": 30,
    "faulty_disk: killed_at::g2_g3_a_daemon_that_dies_at_any_step_of_a_recovery_or_of_its_end_loses_nothing_that_it_must_not": 30,
    "faulty_disk: killed_at::g2_g3_a_daemon_that_dies_at_any_step_of_the_drain_loses_nothing_that_it_must_not": 30,
    "golden: newer::an_ownership_record_or_redo_of_a_newer_version_is_refused_and_left_as_it_is": 30,
    "network: each_way_takes_its_time_and_a_killed_process_leaves_nothing_of_its_network": 30,
    "pair: failover::a_dead_host_is_not_failed_over_before_it_is_said_to_be_fenced": 30,
    "pair: migration::a_guest_that_stays_keeps_its_volume": 30,
    "pair: power::g4_an_owner_that_has_lost_its_power_gets_from_its_peer_what_it_has_lost": 30,
    "program: demo::an_interrupted_demo_leaves_nothing_behind": 30,
    "program: second_copy::certificates_of_others_are_refused_by_either_side_until_they_are_replaced": 30,
    "tidepool_driver: ring::tests::a_full_queue_loses_no_operation": 30,
    "backend: rbd::a_killed_owners_image_cannot_be_written_by_others_even_when_its_lock_has_fallen": 25,
    "backend: same::among_two_hundred_swaps_nothing_dirty_goes_to_another_device": 25,
    "engine: reclaim::g8_writes_do_not_take_the_room_that_a_segment_needs_to_be_emptied": 25,
    "golden: every_golden_image_is_served_and_drained_as_if_it_were_of_today": 25,
    "golden: what_an_earlier_version_has_left_is_served_and_drained": 25,
    "nbd_backend: a_write_through_volume_answers_only_what_the_server_has_kept": 25,
    "pair: g4_a_copy_that_does_not_count_is_not_taken_over": 25,
    "pair: g6_hosts_with_different_leases_keep_no_copies_for_each_other": 25,
    "program: second_copy::a_front_door_for_one_volume_is_open_where_its_copy_is": 25,
    "program: second_copy::a_client_without_tls_is_told_from_a_certificate": 25,
    "seeds: a_seed_replays_to_the_last_event": 25,
    "backend: nbd::the_export_holds_exactly_what_was_written": 20,
    "daemon_killed: clean_data_is_still_warm_after_a_kill": 20,
    "daemon_killed: g2_an_orderly_end_under_load_has_status_0_and_loses_nothing": 20,
    "full_cache: g8_a_backend_that_returns_after_the_daemon_was_killed_gets_everything": 20,
    "interop: fio_verifies_what_it_wrote": 20,
    "pair: power::g4_what_cannot_be_got_from_the_peer_is_taken_over_there": 20,
    "program: lab::a_bad_ssd_gets_its_grade": 20,
    "program: serving::a_backend_that_does_not_answer_holds_the_end_up_for_a_while_only": 20,
}
# Tests, or all tests of a program, that take more of the machine than one core now and then.
WEIGHTS = {
    "guard": 2,
    "guest": 2,
    "lost_cache: g5_a_destroyed_cache_leaves_a_filesystem_and_a_database_that_recover": 2,
}


class Job:
    """A process that runs tests: one of `program`, or, where `test` is None, all of them."""

    def __init__(self, program, command, directory, test=None):
        self.program, self.command, self.directory, self.test = program, command, directory, test
        self.name = f"{program}: {test}" if test else program
        self.weight = WEIGHTS.get(self.name, WEIGHTS.get(program, 1))


class Results:
    """What came of the tests."""

    def __init__(self, all_must_run):
        self.all_must_run = all_must_run
        self.lock = threading.Lock()
        self.passed = self.failed = 0
        # Seconds by test, and by program.
        self.tests, self.programs = {}, {}
        self.failures, self.not_run = [], []
        self.start = time.monotonic()

    def add(self, job, text, status, took_s, cpu_s, tests):
        counts = re.findall(r"^test result: .* (\d+) passed; (\d+) failed;", text, re.M)
        passed, failed = (sum(int(count[i]) for count in counts) for i in (0, 1))
        # A process without a result failed, too.
        if status != 0 and failed == 0 or not counts:
            failed += 1
        reasons = [f"{job.name}: {line}" for line in NOT_RUN.findall(text)]
        if reasons and self.all_must_run:
            passed, failed = 0, failed + 1
        with self.lock:
            self.not_run += reasons
            self.passed += passed
            self.failed += failed
            self.tests.update(tests)
            self.programs[job.program] = self.programs.get(job.program, 0) + took_s
            what = "FAILED" if failed else "ok"
            print(f"{what:>6} {time.monotonic() - self.start:6.0f} s: {took_s:7.1f} s {cpu_s:7.1f} s of CPU  {job.name}", flush=True)
            if failed:
                names = re.findall(r"^test (.*) \.\.\. FAILED$", text, re.M)
                self.failures.append(([f"{job.program}: {name}" for name in names] or [job.name], what_failed(text)))
                print(text, flush=True)
            elif job.program in ("seeds", "mutations"):
                # What they have been through is said also when nothing is wrong: which seeds, and
                # what was reached.
                print(text, flush=True)


def build(arguments):
    """Compiles; returns the messages of cargo about what it made."""
    command = ["cargo", "test", "--release", "--no-run", "--message-format=json-render-diagnostics", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    messages = [json.loads(line) for line in process.stdout]
    if process.wait() != 0:
        sys.exit("the tests do not compile")
    return [message for message in messages if message["reason"] == "compiler-artifact" and message["executable"]]


def jobs_of(artifact):
    """The jobs of a test program: with real parts one for each test, else one."""
    directory = os.path.dirname(artifact["manifest_path"])
    package = re.search(r'^name = "(.*)"', open(artifact["manifest_path"]).read(), re.M).group(1)
    program, path = artifact["target"]["name"], artifact["executable"]
    if package not in REAL_PARTS:
        return False, [Job(program, [path, "--test-threads=1", "--show-output"], directory)]
    listed = subprocess.run([path, "--list", "--format", "terse"], stdout=subprocess.PIPE, text=True, check=True, cwd=directory)
    ignored = subprocess.run([path, "--list", "--format", "terse", "--ignored"], stdout=subprocess.PIPE, text=True, check=True, cwd=directory)
    names = lambda done: [line.removesuffix(": test") for line in done.stdout.splitlines() if line.endswith(": test")]
    left_out = set(names(ignored))
    return True, [Job(program, [path, "--exact", name, "--show-output"], directory, name) for name in names(listed) if name not in left_out]


def what_failed(text):
    """What the tests of a process said that failed, for the end of the output, where people look."""
    start = text.rfind("\nfailures:\n\n----")
    return text[start:][-FAILURE_CHARACTERS:] if start >= 0 else text[-FAILURE_CHARACTERS:]


class Runner:
    """Runs jobs, and ends them when the run is interrupted."""

    def __init__(self, results):
        self.results = results
        self.running = set()
        self.lock = threading.Lock()
        self.over = False

    def run(self, job, nice):
        start = time.monotonic()
        with self.lock:
            if self.over:
                return
            process = subprocess.Popen(
                (["nice", "-n", "19"] if nice else []) + job.command,
                cwd=job.directory,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | ENVIRONMENTS.get(job.program, {}),
            )
            self.running.add(process)
        alarm = threading.Timer(TEST_MAX_S * (4 if nice else 1), self.end, [process])
        alarm.start()
        # The test's name comes before its outcome: the time between two outcomes is what the test
        # took.
        text, tests, since = [], {}, start
        for line in process.stdout:
            line = line.decode(errors="replace")
            text.append(line)
            outcome = re.search(r"^test (.*?)(?: - should panic)? \.\.\. (?:.*)?(ok|FAILED)$", line)
            if outcome:
                now = time.monotonic()
                tests[f"{job.program}: {outcome.group(1)}"] = now - since
                since = now
        # The usage of the process and of its children that it waited for.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        alarm.cancel()
        took_s = time.monotonic() - start
        with self.lock:
            self.running.discard(process)
            if self.over:
                return
        if took_s >= TEST_MAX_S and process.returncode == -signal.SIGKILL:
            text.append(f"\n{job.name} did not end in {TEST_MAX_S} s and was killed\n")
        if job.test:
            tests = {job.name: took_s}
        self.results.add(job, "".join(text), process.returncode, took_s, usage.ru_utime + usage.ru_stime, tests)

    def end(self, process):
        """Kills a process and its children."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def end_all(self):
        with self.lock:
            self.over = True
            for process in self.running:
                self.end(process)


def busy_s():
    """Seconds for which the machine's cores have been busy, together."""
    with open("/proc/stat") as file:
        user, low, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + low + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def taken_s():
    """Seconds for which the machine's cores had no room for more, together: also those in which they waited for the disk, or did another
    machine's work. What has a low priority makes room."""
    with open("/proc/stat") as file:
        user, _, system, _, wait, irq, softirq, stolen, *_ = map(int, file.readline().split()[1:])
    return (user + system + wait + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


def run_all(runner, real, computing, shared):
    """Runs the jobs with real parts by their weights, as soon as the cluster that they share is up, and beside them those that only
    compute, one on each core."""
    cores = os.cpu_count() or 1
    capacity = WEIGHT_PER_CORE * cores
    expected_s = lambda job: SLOW.get(job.name, 0)
    waiting = sorted(real, key=lambda job: (-expected_s(job), -job.weight))
    changed = threading.Condition()
    load = 0

    def one(job):
        nonlocal load
        runner.run(job, nice=False)
        with changed:
            load -= job.weight
            changed.notify_all()

    def patient(queue):
        while True:
            with changed:
                if not queue:
                    return
                job = queue.pop(0)
            runner.run(job, nice=True)

    threads = [threading.Thread(target=patient, args=(computing,), daemon=True) for _ in range(cores)]
    for thread in threads:
        thread.start()
    if shared:
        shared.wait_up()

    def watch():
        """Has more run at once while the machine has room for it."""
        nonlocal capacity
        before = taken_s()
        while waiting:
            time.sleep(1)
            after = taken_s()
            with changed:
                free = 1 - (after - before) / cores
                capacity = (WEIGHT_PER_CORE_MAX if free > FREE_SHARE else WEIGHT_PER_CORE) * cores
                changed.notify_all()
            before = after

    threading.Thread(target=watch, daemon=True).start()
    while waiting:
        with changed:
            # The first that fits; one that is too heavy for the machine runs alone.
            fits = lambda: next((job for job in waiting if load + job.weight <= max(capacity, job.weight)), None)
            changed.wait_for(lambda: fits() is not None)
            job = fits()
            waiting.remove(job)
            load += job.weight
        thread = threading.Thread(target=one, args=(job,), daemon=True)
        threads.append(thread)
        thread.start()
    for thread in threads:
        thread.join()


class SharedCluster:
    """The cluster that tests share, which ends when its input does."""

    def __init__(self, path):
        self.process = subprocess.Popen([path, "1", "cephx"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def wait_up(self):
        """Waits until it is up, and tells the tests where it is."""
        conf = self.process.stdout.readline().strip()
        if not conf:
            sys.exit("the cluster that the tests share does not come up")
        os.environ["TIDEPOOL_TEST_CLUSTER"] = conf

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def report(results, took_s, busy_s):
    """Where the time went, what is over budget and what failed."""
    slowest = lambda times: heapq.nlargest(SLOWEST, times.items(), key=lambda item: item[1])
    for title, times in (("programs, with the sum of their tests", results.programs), ("tests", results.tests)):
        print(f"\nThe slowest {title}:")
        for name, seconds in slowest(times):
            print(f"{seconds:9.1f} s  {name}")
    total_s = sum(results.programs.values())
    share = busy_s / (took_s * (os.cpu_count() or 1))
    print(f"\n{took_s:.0f} s after compiling, for {total_s:.0f} s of tests; the cores were busy for {share:.0%} of it")
    for name, seconds in sorted(results.tests.items()):
        if seconds > TEST_BUDGET_S and name not in SLOW:
            print(f"over budget: {name} took {seconds:.0f} s of {TEST_BUDGET_S} s: make it faster, or move it to `make long`")
    if took_s > BUDGET_S:
        print(f"over budget: the tests took {took_s:.0f} s of {BUDGET_S} s: make one of the slowest faster, or move it to `make long`")
    for reason in results.not_run:
        print(f"could not do what it is there for: {reason}")
    for names, said in results.failures:
        print(f"\nfailed: {', '.join(names)}\n{said}")
    print(f"{results.passed} passed, {results.failed} failed")


def artifacts(arguments):
    """What cargo makes of the arguments, or without any, of everything."""
    built = build(arguments or ["--workspace"])
    return built if arguments else built + build(MUTATIONS)


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--build-only")
    parser.add_argument("--built")
    parser.add_argument("--programs")
    parser.add_argument("--all-must-run", action="store_true")
    options, arguments = parser.parse_known_args()
    if options.built:
        with open(options.built) as file:
            built = json.load(file)
    else:
        built = artifacts(arguments)
    if options.build_only:
        with open(options.build_only, "w") as file:
            json.dump(built, file)
        return 0
    wanted = options.programs.split(",") if options.programs else None
    real, computing, cluster = [], [], None
    for artifact in built:
        name = artifact["target"]["name"]
        if artifact["profile"]["test"]:
            if wanted is None or name in wanted:
                with_parts, jobs = jobs_of(artifact)
                (real if with_parts else computing).extend(jobs)
        elif name in RUN_BY_TESTS:
            os.environ.setdefault(RUN_BY_TESTS[name], artifact["executable"])
        elif name == CLUSTER:
            cluster = artifact["executable"]
    if wanted is None and not options.built and not any(word in ("--test", "--tests", "--lib", "--bin", "--bins") for word in arguments):
        computing.append(Job("doc tests", ["cargo", "test", "--release", "--doc", *(arguments or ["--workspace"])], os.getcwd()))
    # The simulator computes longest.
    computing.sort(key=lambda job: job.program not in ("seeds", "mutations"))
    results = Results(options.all_must_run)
    runner = Runner(results)
    start, busy_before_s = time.monotonic(), busy_s()
    shared = SharedCluster(cluster) if cluster and real else None
    try:
        run_all(runner, real, computing, shared)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        runner.end_all()
        if shared:
            shared.end()
    report(results, time.monotonic() - start, busy_s() - busy_before_s)
    return 1 if results.failed else 0


if __name__ == "__main__":
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    sys.exit(main())

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
# Tests with real parts that run at once, by weight, per core.
WEIGHT_PER_CORE = 3
# Test programs and tests that are shown as the slowest.
SLOWEST = 20
# A test that says so at the beginning of a line could not do what it is there for.
NOT_RUN = re.compile(r"^(?:not run|not tested|skipped)[:,].*", re.M)
# Most that is said again of a test that failed.
FAILURE_CHARACTERS = 6000
# The packages whose tests start daemons, clusters and guests.
REAL_PARTS = ["tidepool", "tidepool-backend", "tidepool-lab", "tidepool-testkit", "tidepool-tests"]
# What is compiled differently: the core with its deliberate bugs.
MUTATIONS = ["--package", "tidepool-sim", "--features", "mutations", "--test", "mutations"]
# Programs that the tests run, by cargo's name, and the variable that tells the tests where they are.
RUN_BY_TESTS = {"tidepool": "TIDEPOOL_BIN", "tidepool-long-limits": "TIDEPOOL_LONG_LIMITS_BIN"}
CLUSTER = "ceph-cluster"

# Tests that may take longer than TEST_BUDGET_S, with the seconds that they take; they start first.
SLOW = {}
# Tests, or all tests of a program, that take more of the machine than one core now and then.
WEIGHTS = {}


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
        self.cpu_s = 0.0

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
            self.cpu_s += cpu_s
            what = "FAILED" if failed else "ok"
            print(f"{what:>6} {took_s:7.1f} s {cpu_s:7.1f} s of CPU  {job.name}", flush=True)
            if failed:
                names = re.findall(r"^test (.*) \.\.\. FAILED$", text, re.M)
                self.failures.append(([f"{job.program}: {name}" for name in names] or [job.name], what_failed(text)))
                print(text, flush=True)
            elif job.program in ("seeds", "mutations"):
                # What they have been through is said also when nothing is wrong: which seeds, and what was reached.
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
            )
            self.running.add(process)
        alarm = threading.Timer(TEST_MAX_S * (4 if nice else 1), self.end, [process])
        alarm.start()
        # The test's name comes before its outcome: the time between two outcomes is what the test took.
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


def run_all(runner, real, computing):
    """Runs the jobs with real parts by their weights, and beside them those that only compute, one on each core."""
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


def shared_cluster(path):
    """Starts the cluster that tests share; returns its process, which ends when its input does."""
    process = subprocess.Popen([path, "1", "cephx"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    conf = process.stdout.readline().strip()
    if not conf:
        sys.exit("the cluster that the tests share does not come up")
    os.environ["TIDEPOOL_TEST_CLUSTER"] = conf
    return process


def report(results, took_s):
    """Where the time went, what is over budget and what failed."""
    slowest = lambda times: heapq.nlargest(SLOWEST, times.items(), key=lambda item: item[1])
    for title, times in (("programs, with the sum of their tests", results.programs), ("tests", results.tests)):
        print(f"\nThe slowest {title}:")
        for name, seconds in slowest(times):
            print(f"{seconds:9.1f} s  {name}")
    total_s = sum(results.programs.values())
    print(f"\n{took_s:.0f} s after compiling, for {total_s:.0f} s of tests and {results.cpu_s:.0f} s of CPU time in processes that ended in order")
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
    start = time.monotonic()
    shared = shared_cluster(cluster) if cluster and real else None
    try:
        run_all(runner, real, computing)
    except KeyboardInterrupt:
        runner.end_all()
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if shared:
            shared.stdin.close()
            shared.wait()
    report(results, time.monotonic() - start)
    return 1 if results.failed else 0


if __name__ == "__main__":
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    sys.exit(main())

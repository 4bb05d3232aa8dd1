#!/usr/bin/env python3
"""Runs every test of the workspace. The last line is `N passed, N failed`, over all test programs; the exit status is 0 only if
nothing failed. Arguments go to cargo: scripts/test.py --package tidepool-engine

The same profile as the program that users run, so that everything is compiled once and what is tested is what is shipped; the tests
with real parts find the program next to themselves. Most of them wait for clusters and guests most of the time, so three test programs
run at once, and beside them, with the time that they leave, those that only compute.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time

AT_ONCE = 3
# Most that is said again of a program that failed.
FAILURE_CHARACTERS = 6000
# Longest first, so that none is left over at the end.
LONG = ["rbd", "pair", "guard", "lab_runs", "guest", "device", "lab", "readme", "faulty_disk", "ceph", "ceph_failing", "snapshot", "cluster", "clones", "network",
        "lost_cache", "daemon_killed"]
# What only computes, on all cores, and can wait.
PATIENT = ["seeds", "mutations"]
# What is compiled differently: the core with its deliberate bugs.
MUTATIONS = ["--package", "tidepool-sim", "--features", "mutations", "--test", "mutations"]


def programs(arguments):
    """Compiles everything; returns the name, the path and the working directory of each test program."""
    command = ["cargo", "test", "--release", "--no-run", "--message-format=json-render-diagnostics", *arguments]
    build = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    found = []
    for line in build.stdout:
        message = json.loads(line)
        if message["reason"] != "compiler-artifact" or not message["executable"]:
            continue
        if message["target"]["name"] == "tidepool" and not message["profile"]["test"]:
            # What the tests with real parts run; without it each of them asks cargo.
            os.environ.setdefault("TIDEPOOL_BIN", message["executable"])
        if message["profile"]["test"]:
            directory = os.path.dirname(message["manifest_path"])
            found.append((message["target"]["name"], message["executable"], directory))
    if build.wait() != 0:
        sys.exit("the tests do not compile")
    rank = {name: i for i, name in enumerate(LONG)}
    return sorted(found, key=lambda program: rank.get(program[0], len(LONG)))


def run(command, directory):
    """Runs a program to its end; returns its output and how many tests passed and failed."""
    start = time.monotonic()
    done = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    text = done.stdout.decode(errors="replace")
    results = re.findall(r"^test result: .* (\d+) passed; (\d+) failed;", text, re.M)
    passed, failed = (sum(int(result[i]) for result in results) for i in (0, 1))
    # What ended without a result failed, too.
    if done.returncode != 0 and failed == 0:
        failed = 1
    header = f"\n     Running {' '.join(command)} ({time.monotonic() - start:.0f} s)\n"
    return header + text, passed, failed


def what_failed(text):
    """What the tests of a program said that failed, for the end of the output, where whoever looks finds it."""
    start = text.rfind("\nfailures:\n\n----")
    return text[start:][-FAILURE_CHARACTERS:] if start >= 0 else text[-FAILURE_CHARACTERS:]


def main():
    arguments = sys.argv[1:] or ["--workspace"]
    found = programs(arguments)
    if not sys.argv[1:]:
        found += programs(MUTATIONS)
    waiting = [([path], directory) for name, path, directory in found if name not in PATIENT]
    # What they have been through is said also when nothing is wrong: which seeds, and what was reached.
    patient = [(["nice", "-n", "19", path, "--show-output"], directory) for name, path, directory in found if name in PATIENT]
    if not any(argument in ("--test", "--tests", "--lib", "--bin", "--bins") for argument in arguments):
        waiting.append((["cargo", "test", "--release", "--doc", *arguments], os.getcwd()))
    waiting.reverse()
    patient.reverse()
    lock, totals, failures = threading.Lock(), [0, 0], []

    def work(queue):
        while True:
            with lock:
                if not queue:
                    return
                command, directory = queue.pop()
            text, passed, failed = run(command, directory)
            with lock:
                print(text, flush=True)
                totals[0] += passed
                totals[1] += failed
                if failed:
                    names = re.findall(r"^test (.*) \.\.\. FAILED$", text, re.M)
                    failures.append((names or [" ".join(command)], what_failed(text)))

    workers = [threading.Thread(target=work, args=(queue,)) for queue in [waiting] * AT_ONCE + [patient]]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for names, said in failures:
        print(f"\nfailed: {', '.join(names)}\n{said}")
    print(f"{totals[0]} passed, {totals[1]} failed")
    return 1 if totals[1] else 0


if __name__ == "__main__":
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    sys.exit(main())

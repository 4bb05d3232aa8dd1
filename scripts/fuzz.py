#!/usr/bin/env python3
"""Fuzzes what takes bytes from elsewhere, guided by coverage: scripts/fuzz.py [TARGET...] [--seconds N | --hours H] [--merge]

The targets are in fuzz/src, their corpora in fuzz/corpus; without a TARGET it is the turn of all. Each has N seconds. What an input
must not do it does for good: it stays under TARGET_DIR/fuzz/findings, and the output says how to see it again. What reached
something new stays under TARGET_DIR/fuzz/corpus for the next run; --merge brings as few of these as possible into fuzz/corpus.

The build has a counter in every branch, of the dependencies too, and checks for overflow. It needs nothing but the toolchain and a
C++ compiler: libFuzzer is compiled from a crate. Ctrl-C ends all targets; what they have found until then is told and kept.
"""

import argparse
import concurrent.futures
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
FLAGS = [
    "--cfg=fuzzing",
    "--cfg=fuzzing_libfuzzer",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cdebug-assertions",
    "-Coverflow-checks",
]
# An input that takes longer hangs; one that takes more memory would take all of it.
TIMEOUT_S = 10
RSS_MB_MAX = 2048
ADDRESS_BYTES_MAX = 6 << 30
# A fuzzer that is told to end has so long for it.
GOODBYE_S = 5
# Names that are given by the fuzzer are sums of so many digits.
SUM_DIGITS = 40


class Engines:
    """The fuzzers that run, so that all of them can be ended."""

    def __init__(self):
        self.lock, self.running, self.stopped = threading.Lock(), set(), False

    def start(self, *arguments, **options):
        """A process, or None once they are to end."""
        with self.lock:
            if self.stopped:
                return None
            # In a session of its own, so that Ctrl-C comes through `stop` alone.
            process = subprocess.Popen(*arguments, start_new_session=True, **options)
            self.running.add(process)
            return process

    def ended(self, process):
        with self.lock:
            self.running.discard(process)

    def stop(self):
        """Asks all of them to tell what they have, and ends those that do not answer."""
        for number in (signal.SIGINT, signal.SIGKILL):
            with self.lock:
                self.stopped = True
                for process in self.running:
                    process.send_signal(number)
            deadline = time.monotonic() + GOODBYE_S
            while self.running and time.monotonic() < deadline:
                time.sleep(0.1)


ENGINES = Engines()


def target_dir():
    return os.path.join(os.environ.get("CARGO_TARGET_DIR", "target"), "fuzz")


def build():
    """Compiles the targets; returns the path of the program."""
    host = re.search(r"^host: (.*)$", subprocess.check_output(["rustc", "-vV"], text=True), re.M)[1]
    # With a target that is named, programs that run at build time are not instrumented.
    command = ["cargo", "build", "--release", "--locked", "--package=tidepool-fuzz", f"--target={host}",
               "--message-format=json-render-diagnostics"]
    flags = "\x1f".join(os.environ.get("RUSTFLAGS", "").split() + FLAGS)
    environment = dict(os.environ, CARGO_ENCODED_RUSTFLAGS=flags, CARGO_TARGET_DIR=target_dir())
    built = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    messages = map(json.loads, built.stdout.splitlines())
    found = [m["executable"] for m in messages if m["reason"] == "compiler-artifact" and m["executable"]]
    if built.returncode != 0 or not found:
        sys.exit("the fuzz targets do not compile")
    return found[0]


def targets(program):
    """Names of the targets, with the length of the longest sensible input."""
    lines = subprocess.check_output([program, "list"], text=True).splitlines()
    return {name: int(bytes_max) for name, bytes_max in (line.split() for line in lines)}


def limit():
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES_MAX, ADDRESS_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def engine(program, target, arguments):
    """Runs libFuzzer; returns its exit status, None if it did not begin, and what it printed."""
    environment = dict(os.environ, TIDEPOOL_FUZZ_TARGET=target, BOLERO_LIBFUZZER_ARGS=" ".join(arguments))
    environment.setdefault("RUST_BACKTRACE", "0")
    process = ENGINES.start([program], env=environment, preexec_fn=limit, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if process is None:
        return None, ""
    output, _ = process.communicate()
    ENGINES.ended(process)
    return process.returncode, output.decode(errors="replace")


class Target:
    def __init__(self, program, name, bytes_max):
        self.program, self.name = program, name
        self.seeds = os.path.join("fuzz", "corpus", name)
        self.found = os.path.join(target_dir(), "corpus", name)
        self.findings = os.path.join(target_dir(), "findings", name, "")
        for directory in (self.seeds, self.found, self.findings):
            os.makedirs(directory, exist_ok=True)
        self.arguments = [f"-max_len={bytes_max}", f"-timeout={TIMEOUT_S}", f"-rss_limit_mb={RSS_MB_MAX}",
                          f"-artifact_prefix={self.findings}"]
        dictionary = os.path.join("fuzz", "dict", f"{name}.dict")
        if os.path.exists(dictionary):
            self.arguments.append(f"-dict={dictionary}")

    def fuzz(self, seconds):
        """Looks for inputs that break something; returns whether there was none, and the lines that tell."""
        before = set(os.listdir(self.findings))
        arguments = [*self.arguments, f"-max_total_time={seconds}", "-print_final_stats=1", self.found, self.seeds]
        status, text = engine(self.program, self.name, arguments)
        if status is None:
            return None, f"test {self.name} ... not begun"
        stats = dict(re.findall(r"^stat::(\w+): +(\d+)", text, re.M))
        edges = re.findall(r" cov: (\d+)", text)
        findings = sorted(set(os.listdir(self.findings)) - before)
        if status == 0 or (ENGINES.stopped and not findings):
            told = (f"{stats.get('number_of_executed_units', '?')} runs, {stats.get('average_exec_per_sec', '?')}/s, "
                    f"{edges[-1] if edges else 0} edges, {stats.get('new_units_added', '?')} new inputs")
            return True, f"test {self.name} ... ok ({told})"
        again = [f"    cargo run --release -p tidepool-fuzz -- {self.name} {self.findings}{f}" for f in findings]
        tail = "\n".join(text.splitlines()[-60:])
        return False, "\n".join([tail, f"test {self.name} ... FAILED", *again])

    def merge(self):
        """Keeps in the repository what is needed to reach all that was reached."""
        with tempfile.TemporaryDirectory() as merged:
            arguments = [*self.arguments, "-merge=1", merged, self.seeds, self.found]
            status, text = engine(self.program, self.name, arguments)
            if status is None:
                return None, f"test {self.name} ... not begun"
            if status != 0:
                return False, f"{text}\ntest {self.name} ... FAILED"
            named = {}
            for name in os.listdir(self.seeds):
                path = os.path.join(self.seeds, name)
                if len(name) == SUM_DIGITS:
                    os.remove(path)
                else:
                    with open(path, "rb") as file:
                        named[file.read()] = name
            for name in os.listdir(merged):
                path = os.path.join(merged, name)
                with open(path, "rb") as file:
                    content = file.read()
                if content not in named:
                    shutil.copy(path, os.path.join(self.seeds, name[:SUM_DIGITS]))
        files = [os.path.join(self.seeds, name) for name in os.listdir(self.seeds)]
        told = f"{len(files)} inputs, {sum(map(os.path.getsize, files))} bytes"
        return True, f"test {self.name} ... ok ({told})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all if none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--hours", type=float, help="for all of them together")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="targets at once")
    parser.add_argument("--merge", action="store_true", help="update the corpora of the repository instead")
    parser.add_argument("--build", action="store_true", help="only compile")
    arguments = parser.parse_args()
    program = build()
    if arguments.build:
        return 0
    known = targets(program)
    wanted = [name for name in arguments.targets if name != "all"] or list(known)
    if arguments.hours:
        arguments.seconds = max(1, int(arguments.hours * 3600 * min(arguments.jobs, len(wanted)) / len(wanted)))
    unknown = [name for name in wanted if name not in known]
    if unknown:
        sys.exit(f"there is no target {unknown[0]}; there are {', '.join(known)}")

    def work(name):
        target = Target(program, name, known[name])
        good, text = target.merge() if arguments.merge else target.fuzz(arguments.seconds)
        print(text, flush=True)
        return good

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        runs = [pool.submit(work, name) for name in wanted]
        try:
            concurrent.futures.wait(runs)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            ENGINES.stop()
    results = [run.result() for run in runs]
    passed, failed, left = results.count(True), results.count(False), results.count(None)
    ended = f"; {left} not begun, stopped by Ctrl-C" if ENGINES.stopped else ""
    print(f"\ntest result: {'FAILED' if failed else 'ok'}. {passed} passed; {failed} failed; fuzz targets{ended}")
    return 1 if failed else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped before anything was fuzzed")

#!/usr/bin/env python3
"""Tries every mutant of the core that cargo-mutants lists: scripts/mutants.py [--again] [--only TEXT] [--jobs N]

All of them are put into one build (the crate in mutants/), in which the environment's MUTANT says which one is in force. First every
test of the core and a number of the simulator's seeds are run with MUTANT=record, which tells what a mutant would change anything in.
Then each mutant is run against these only, until something fails. What comes of it is a line of JSON in WORK/results.jsonl (WORK is
target/mutants); a run that was interrupted goes on from there. --again tries the open survivors with the tests that are new since.
Where WORK is gone, --known goes by mutants/survivors.tsv: what is not in it, wherever its line is by now, was noticed.
"""

import argparse
import collections
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = "tidepool-engine"
ENGINE = "crates/engine"
# Seeds with the simulated seconds of each.
SEEDS = [(seed, 6) for seed in range(1, 61)] + [(seed, 20) for seed in range(1, 21)]
# How much more a mutant of the same function says than another.
NEAR = 8
# What takes so much more of a processor's time than without a mutant hangs; at least a second, and
# in any case so many on the clock.
SLOWER_MAX = 10
CLOCK_S_MAX = 60
ADDRESS_BYTES_MAX = 4 << 30
# What the slowest test takes of a processor's time.
CONSTANT_SLOWEST_S = 4


class Check:
    """A test, or a seed of the simulator."""

    def __init__(self, name, kind, command, directory):
        self.name, self.kind, self.command, self.directory = name, kind, command, directory
        self.seconds, self.reaches = 0.0, frozenset()
        # Tries and kills, altogether and by function.
        self.all, self.of = [0, 0], collections.defaultdict(lambda: [0, 0])

    def run(self, mutant, reached=None):
        """What became of it, None if it passes; and the time of a processor that it took."""
        environment = dict(os.environ, MUTANT=str(mutant), RUST_BACKTRACE="0", PROPTEST_RNG_SEED="1")
        if reached:
            environment["MUTANT_REACHED"] = str(reached)
        child = subprocess.Popen(self.command, cwd=self.directory, env=environment, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if not reached:
            limit = int(SLOWER_MAX * self.seconds) + 1
            resource.prlimit(child.pid, resource.RLIMIT_CPU, (limit, limit + 1))
        clock = threading.Timer(CLOCK_S_MAX + SLOWER_MAX * self.seconds, child.kill)
        clock.start()
        _, status, usage = os.wait4(child.pid, 0)
        clock.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
        hangs = child.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
        return "timeout" if hangs else "failed" if child.returncode else None, usage.ru_utime + usage.ru_stime

    def count(self, function, killed):
        for counts in (self.all, self.of[function]):
            counts[0] += 1
            counts[1] += killed

    def worth(self, function):
        """How promising it is against a mutant of a function: what it did to others of the same function tells most, and a test that
        reaches little of the core looks closer at that."""
        (tries, kills), (near_tries, near_kills) = self.all, self.of[function]
        return (NEAR * near_kills + kills + 1) / (NEAR * near_tries + tries + 2) / (self.seconds + 0.02) / (len(self.reaches) + 1)


def cargo(directory, target, *arguments):
    # The build's mutants need what only the compiler may do otherwise (mutants/src/module.rs).
    environment = dict(os.environ, CARGO_TARGET_DIR=str(target), RUSTC_BOOTSTRAP="1")
    done = subprocess.run(["cargo", *arguments], cwd=directory, env=environment, stdout=subprocess.PIPE)
    if done.returncode != 0:
        sys.exit(f"cargo {' '.join(arguments)} has failed in {directory}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]


def files():
    """The repository's files, but for the crate that puts the mutants into them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout.decode().split("\0")
    return [name for name in listed if name and not name.startswith("mutants/") and (ROOT / name).is_file()]


def copy(tree):
    shutil.rmtree(tree, ignore_errors=True)
    for name in files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)


def executables(messages):
    return {message["target"]["name"]: message for message in messages if message.get("executable")}


def prepare(work):
    """The sources with all mutants in them, below `work`."""
    tree, stamp = work / "tree", work / "stamp"
    digest = hashlib.sha256()
    for name in [*sorted(files()), *sorted(map(str, (ROOT / "mutants/src").iterdir()))]:
        if name.startswith(("Cargo", "crates/", "/")):
            digest.update(name.encode() + (ROOT / name).read_bytes())
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        return tree
    copy(tree)
    listed = subprocess.run(["cargo", "mutants", "--list", "--json", "-p", PACKAGE], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    names = [mutant["name"] for mutant in json.loads(listed.stdout)]
    old = work / "list.json"
    if old.exists() and [mutant["name"] for mutant in json.loads(old.read_text())] != names:
        sys.exit(f"the mutants are others than those in {old}: remove {work} and begin anew")
    old.write_bytes(listed.stdout)
    environment = dict(os.environ, CARGO_TARGET_DIR=str(work / "target"))
    tool = ["cargo", "run", "--quiet", "--locked", "--manifest-path", str(ROOT / "mutants/Cargo.toml"), "--"]
    arguments = [str(old), str(tree), PACKAGE, str(work / "left.jsonl")]
    if subprocess.run([*tool, *arguments], env=environment).returncode != 0:
        sys.exit("the sources with all mutants in them do not compile")
    stamp.write_text(digest.hexdigest())
    return tree


OPTIONS = ["--release", "--message-format=json-render-diagnostics"]


def seeds_of(target, tree):
    simulator = executables(cargo(tree, target, "build", *OPTIONS, "-p", "tidepool-sim"))["tidepool-sim"]["executable"]
    checks = []
    for seed, seconds in SEEDS:
        command = [simulator, "--seed", str(seed), "--seconds", str(seconds)]
        checks.append(Check(f"seed {seed} ({seconds} s)", "seed", command, tree))
    return checks


def tests_of(target, tree):
    """All tests; a test's kind is where it is."""
    tests = cargo(tree, target, "test", "--no-run", "--lib", "--tests", *OPTIONS, "-p", PACKAGE)
    checks = []
    for name, message in executables(tests).items():
        program = message["executable"]
        kind = "unit" if "lib" in message["target"]["kind"] else "test"
        listed = subprocess.run([program, "--list", "--format", "terse"], cwd=tree / ENGINE, check=True, stdout=subprocess.PIPE, text=True)
        ignored = subprocess.run([program, "--list", "--format", "terse", "--ignored"], cwd=tree / ENGINE, check=True,
                                 stdout=subprocess.PIPE, text=True)
        for line in sorted(set(listed.stdout.splitlines()) - set(ignored.stdout.splitlines())):
            test = line.removesuffix(": test")
            if test != line:
                checks.append(Check(f"{name}::{test}", kind, [program, "--exact", test, "--test-threads=1"], tree / ENGINE))
    return checks


def record(work, checks, jobs):
    """Runs everything without a mutant, and notes which ones would have changed something. What has not changed since the last time
    is not run again."""
    path = work / "reached.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    stamps = {program: list(os.stat(program)[6:9:2]) for program in {check.command[0] for check in checks}}

    def one(index):
        check = checks[index]
        if known.get(check.name, {}).get("of") != stamps[check.command[0]]:
            reached = work / f"reached.{index}"
            bad, seconds = check.run("record", reached)
            if bad:
                return f"{check.name} has {bad} without a mutant"
            reaches = list(map(int, reached.read_text().split()))
            reached.unlink()
            known[check.name] = {"of": stamps[check.command[0]], "seconds": seconds, "reaches": reaches}
        check.seconds, check.reaches = known[check.name]["seconds"], frozenset(known[check.name]["reaches"])

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        bad = [what for what in pool.map(one, range(len(checks))) if what]
    if bad:
        sys.exit("\n".join(bad))
    path.write_text(json.dumps(known))


def constant(work, mutant, what):
    """Tries a mutant of what the compiler evaluates, in a build of its own; `mutant` is its number, `what` is how it is listed."""
    tree, target = work / "constant", work / "constant-target"
    if not tree.exists():
        copy(tree)
    source, (start, end) = tree / what["file"], (what["span"]["start"], what["span"]["end"])
    assert start["line"] == end["line"], "an operator is on one line"
    original = source.read_text()
    lines = original.splitlines(keepends=True)
    line = lines[start["line"] - 1]
    lines[start["line"] - 1] = line[: start["column"] - 1] + what["replacement"] + line[end["column"] - 1 :]
    result = {"mutant": mutant, "name": what["name"], "state": "survived", "tried": []}
    environment = dict(os.environ, CARGO_TARGET_DIR=str(target))
    try:
        source.write_text("".join(lines))
        check = ["cargo", "check", "--quiet", "--release", "-p", PACKAGE]
        if subprocess.run(check, cwd=tree, env=environment, stderr=subprocess.DEVNULL).returncode != 0:
            return dict(result, state="unviable")
        for checks in (tests_of, seeds_of):
            for check in checks(target, tree):
                # Without a mutant of its own to compare with, a test has as long as the slowest
                # needs.
                check.seconds = CONSTANT_SLOWEST_S
                bad, _ = check.run(0)
                if bad:
                    return dict(result, state="killed" if bad == "failed" else "timeout", by=check.name, kind=check.kind)
                result["tried"].append(check.name)
    finally:
        source.write_text(original)
    return result


class Run:
    def __init__(self, checks, listed, results, options):
        self.checks, self.results, self.options = checks, results, options
        self.names = [mutant["name"] for mutant in listed]
        self.functions = [mutant["file"] + ((mutant["function"] or {}).get("function_name") or "") for mutant in listed]
        self.lock, self.ended, self.counts = threading.Lock(), threading.Event(), collections.Counter()

    def order(self, mutant, function, tried):
        able = [check for check in self.checks if mutant in check.reaches and check.name not in tried]
        left, seeds = self.options.budget, self.options.seeds
        while able:
            check = max(able, key=lambda check: check.worth(function))
            able.remove(check)
            seeds -= check.kind == "seed"
            if check.kind == "seed" and seeds < 0:
                continue
            yield check
            left -= check.seconds
            if left < 0:
                return

    def learn(self, results):
        """What earlier runs have shown of the checks."""
        known = {check.name: check for check in self.checks}
        for result in results:
            function = self.functions[result["mutant"] - 1]
            for name, killed in [(name, False) for name in result.get("tried", ())] + [(result.get("by"), True)]:
                if name in known:
                    known[name].count(function, killed)

    def one(self, mutant, tried=()):
        while self.options.pause and os.path.exists(self.options.pause):
            time.sleep(2)
        if self.ended.is_set():
            return
        result = {"mutant": mutant, "name": self.names[mutant - 1], "state": "not reached"}
        began, tried = time.monotonic(), list(tried)
        function = self.functions[mutant - 1]
        for check in self.order(mutant, function, tried):
            bad, _ = check.run(mutant)
            if self.ended.is_set():
                return
            with self.lock:
                check.count(function, bad is not None)
            if bad:
                result.update(state="killed" if bad == "failed" else "timeout", by=check.name, kind=check.kind)
                break
            tried.append(check.name)
        else:
            if tried:
                result.update(state="survived", tried=tried)
        result["seconds"] = round(time.monotonic() - began, 2)
        with self.lock:
            self.results.write(json.dumps(result) + "\n")
            self.results.flush()
            self.counts[result["state"]] += 1
            if sum(self.counts.values()) % 100 == 0:
                print(time.strftime("%H:%M:%S"), dict(self.counts), flush=True)


def latest(path):
    """The last result of each mutant."""
    if not path.exists():
        return {}
    return {result["mutant"]: result for result in map(json.loads, path.read_text().splitlines())}


def summary(names, left, results):
    states = collections.Counter(line["state"] for number, line in left.items() if number not in results)
    by = {"unit": "a unit test", "test": "a test of the whole core", "seed": "the simulator"}
    for result in results.values():
        state, kind = result["state"], by.get(result.get("kind"))
        states[f"hangs in {kind}" if state == "timeout" else f"{state} by {kind}" if kind else state] += 1
    words = {"unviable": "do not compile", "constant": "constants, not tried", "not reached": "change nothing in any check"}
    return [("listed", len(names)), *((words.get(state, state), count) for state, count in sorted(states.items()))]


def rows_of(name):
    """The rows of a table in mutants/."""
    path = ROOT / "mutants" / name
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(line.split("\t")) for line in lines if not line.startswith("#")]


@functools.cache
def source_lines(file):
    return (ROOT / file).read_text().splitlines()


def place(mutant):
    """What tells a mutant from others, whatever is above it in its file: file, function, line and change."""
    file = mutant["file"].removeprefix(f"{ENGINE}/src/")
    function = ((mutant["function"] or {}).get("function_name") or "constants").replace("Engine::", "")
    line = source_lines(mutant["file"])[mutant["span"]["start"]["line"] - 1]
    return file, function, line.strip(), mutant["name"].split(": ", 1)[1]


def survivors(listed, results):
    """The survivors, with their numbers, by file, function and reason why they may."""
    reasons, rows = rows_of("justified.tsv"), collections.OrderedDict()
    for number, mutant in enumerate(listed, 1):
        if results.get(number, {}).get("state") not in ("survived", "not reached"):
            continue
        file, function, line, _ = place(mutant)
        fitting = (why for f, of, text, why in reasons if (f, of) == (file, function) and (text == "*" or text in line))
        reason = next(fitting, "open")
        if reason == "open" and " | with ^ " in mutant["name"] and results[number]["state"] == "not reached":
            reason = "equal: the bits are never set in both"
        if reason == "open" and " % with + " in mutant["name"] and ("<<" in line or ">>" in line):
            reason = "equal: a shift takes its count modulo the word"
        rows.setdefault((file, function, reason), []).append((number, mutant))
    return rows


def open_ones(rows):
    return {number for (_, _, reason), found in rows.items() if reason == "open" for number, _ in found}


def classes(rows):
    """How many survivors there are of each class of reasons."""
    counts = collections.Counter()
    for (_, _, reason), found in rows.items():
        counts[re.split("[:,]", reason)[0]] += len(found)
    return sorted(counts.items())


def renew(names, listed, left, results):
    """The figures in docs/mutants.md, and all survivors in mutants/survivors.tsv."""
    rows = survivors(listed, results)
    head = "# Survivors, open or not: file, function, line and change. Tabs between them. Written by scripts/mutants.py --renew.\n"
    places = ["\t".join(place(mutant)) for found in rows.values() for _, mutant in found]
    (ROOT / "mutants/survivors.tsv").write_text(head + "".join(f"{place}\n" for place in places))
    document = ROOT / "docs/mutants.md"
    text = document.read_text()
    text = text[: text.index("## Figures")]
    table = lambda lines: "\n".join(f"| {what} | {count} |" for what, count in lines)
    figures, by_class = table(summary(names, left, results)), table(classes(rows))
    document.write_text(
        f"{text}## Figures\n\n| | mutants |\n|---|---|\n{figures}\n\n| class of survivor | mutants |\n|---|---|\n{by_class}\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "target/mutants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seeds", type=int, default=25, help="of those that a mutant changes something in, so many are tried")
    parser.add_argument("--budget", type=float, default=60, help="seconds of a processor's time without the mutant that are spent on it")
    parser.add_argument("--again", action="store_true", help="survivors, with the tests that they were not tried with")
    parser.add_argument("--known", action="store_true", help="mutants without a result count by mutants/survivors.tsv")
    parser.add_argument("--only", default="", help="mutants with this text in their names")
    parser.add_argument("--constants", action="store_true", help="those that the compiler evaluates, each in a build of its own")
    parser.add_argument("--pause", help="nothing new begins while there is a file of this name")
    parser.add_argument("--renew", action="store_true", help="write figures into docs/mutants.md, survivors into mutants/survivors.tsv")
    parser.add_argument("--summary", action="store_true", help="nothing but the figures of what has been tried")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    path = work / "results.jsonl"

    if not options.summary and not options.constants:
        tree = prepare(work)
        checks = tests_of(work / "target", tree) + seeds_of(work / "target", tree)
        # Some mutants would take all memory. Everything that is started from here on inherits this.
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES_MAX, ADDRESS_BYTES_MAX))
        record(work, checks, options.jobs)
    listed = json.loads((work / "list.json").read_text())
    names = [mutant["name"] for mutant in listed]
    left = {line["mutant"]: line for line in map(json.loads, (work / "left.jsonl").read_text().splitlines())}

    def outcome():
        found = latest(path)
        if options.known:
            survived = set(rows_of("survivors.tsv"))
            for mutant in set(range(1, len(listed) + 1)) - set(left) - set(found):
                state = "survived" if place(listed[mutant - 1]) in survived else "noticed before"
                found[mutant] = {"mutant": mutant, "state": state}
        return found

    results = outcome()

    if options.constants:
        with open(path, "a") as file:
            for mutant, line in left.items():
                if line["state"] == "constant" and mutant not in results and options.only in line["name"]:
                    file.write(json.dumps(constant(work, mutant, listed[mutant - 1])) + "\n")
                    file.flush()
        results = outcome()
    elif not options.summary:
        with open(path, "a") as file, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            run = Run(checks, listed, file, options)
            run.learn(results.values())
            still_open = open_ones(survivors(listed, results))
            for mutant, name in enumerate(names, 1):
                if mutant in left or options.only not in name:
                    continue
                if mutant not in results:
                    pool.submit(run.one, mutant)
                elif options.again and mutant in still_open:
                    pool.submit(run.one, mutant, results[mutant].get("tried", ()))
            try:
                pool.shutdown(wait=True)
            except KeyboardInterrupt:
                run.ended.set()
                pool.shutdown(wait=True, cancel_futures=True)
        results = outcome()
    for what, count in summary(names, left, results):
        print(f"{what}: {count}")
    if options.renew:
        renew(names, listed, left, results)


if __name__ == "__main__":
    main()

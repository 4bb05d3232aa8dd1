# make demo    what a host cache does, in about a minute: no Ceph, no root
# make check   before a commit: format, clippy, unit tests, 100 lives of the simulator; no Ceph, nothing is installed
# make test    everything, with real Ceph and real guests; installs what it needs on Debian 12 and 13
# make help    the other targets

CARGO ?= cargo
HOURS ?= 1
ARGS ?=

.PHONY: help demo check test long bench calibrate lint tidy fmt deny sbom deps soak crash lost pair fuzz guard ceph18 mutations mutants seeds compare baseline

help: ## this list
	@grep -hE '^[a-z0-9]+:.*##' Makefile | sed -E 's/^([a-z0-9]+):.*## /\1\t/' | expand -t 10

demo: ## direct against cached, on emulated pools
	@scripts/deps.sh demo
	$(CARGO) run --quiet --release --locked -p tidepool -- demo

check: ## before a commit: format, clippy, unit tests, 100 seeds of the simulator; no Ceph, no root, installs nothing
	$(CARGO) fmt --all -- --check
	$(CARGO) clippy --release --locked --workspace --all-targets -- -D warnings
	$(CARGO) test --quiet --release --locked --workspace --lib --bins
	$(CARGO) run --quiet --release --locked -p tidepool-sim -- --seeds 1..101 --seconds 6

test: deps ## all tests, with real parts; ends with `N passed, N failed`
	@scripts/test.py

long: deps ## tests that wait for half a minute and more, that measure, or that take every case of which make test takes some
	$(CARGO) build --release --locked -p tidepool
	$(CARGO) test --release --locked -p tidepool-backend --test backend rbd:: -- --ignored --skip child_that
	$(CARGO) test --release --locked -p tidepool --test program -- --ignored
	$(CARGO) test --release --locked -p tidepool-testkit --test guest -- --ignored
	$(CARGO) test --release --locked -p tidepool-cluster --test device -- --ignored --nocapture
	$(CARGO) test --release --locked -p tidepool-tests --test snapshot --test clones --test faulty_disk --test readme --test lab_runs --test pair --test ceph_failing --test devices --test restarts --test systemd -- --ignored --nocapture

bench: deps ## raw device, empty NBD server, Tidepool with one copy and with two, librbd; ARGS=--quick for a look
	$(CARGO) build --release --locked -p tidepool
	$(CARGO) run --release --locked -p tidepool-bench -- $(ARGS)

calibrate: deps ## the lab's emulated devices against the figures of their classes, on a machine that does nothing else; ARGS="--slow 4"
	$(CARGO) run --quiet --release --locked -p tidepool -- lab devices --calibrate $(ARGS)

lint: tidy ## formatting, clippy with warnings denied, and whether the code is tidy
	$(CARGO) fmt --all -- --check
	$(CARGO) clippy --release --locked --workspace --all-targets -- -D warnings
	$(CARGO) clippy --release --locked -p tidepool-sim --features mutations --all-targets -- -D warnings
	$(CARGO) fmt --manifest-path mutants/Cargo.toml -- --check
	$(CARGO) clippy --locked --manifest-path mutants/Cargo.toml --target-dir target/mutants/target -- -D warnings

tidy: ## whether the rooms of the core use only what they may, and structs, functions and files stay small; ARGS="--crate engine --summary"
	@scripts/tidy_test.py --quiet
	@scripts/tidy.py $(ARGS)

fmt: ## format everything
	$(CARGO) fmt --all

deny: ## licenses, bans, sources and advisories of all dependencies (installs cargo-deny)
	command -v cargo-deny >/dev/null || $(CARGO) install --locked cargo-deny
	cargo-deny --workspace check licenses bans sources
	@if cargo-deny --workspace fetch db >/dev/null 2>&1; then cargo-deny --workspace check advisories; \
	else echo "advisories: not looked at, because their database cannot be reached"; fi

sbom: ## writes target/sbom.json: all that is compiled into the command (installs cargo-cyclonedx)
	command -v cargo-cyclonedx >/dev/null || $(CARGO) install --locked cargo-cyclonedx
	cargo-cyclonedx cyclonedx --manifest-path crates/tidepool/Cargo.toml --format json --target x86_64-unknown-linux-gnu --override-filename sbom --quiet
	mkdir -p target && mv crates/tidepool/sbom.json target/sbom.json && rm -f crates/*/sbom.json bench/sbom.json fuzz/sbom.json tests/sbom.json

deps: ## install what the tests need
	@scripts/deps.sh test

soak: ## new seeds of the simulator for HOURS hours (0.05 is three minutes) on all cores; leaves target/soak.txt, and what failed in target/soak-failures; ARGS=--pair for two hosts
	@$(CARGO) run --quiet --release --locked -p tidepool-sim -- --hours "$(HOURS)" --seconds 60 --summary target/soak.txt --failures target/soak-failures $(ARGS)

seeds: ## chooses the seeds that make test runs anew, so that they reach everything
	$(CARGO) run --release --locked -p tidepool-sim -- --choose-seeds crates/sim/seeds

compare: ## whether this build's core does in 7,500 lives what the build did that wrote the baseline; ARGS="--seeds 1..501" for some
	$(CARGO) run --release --locked -p tidepool-sim -- --compare crates/sim/baseline.txt $(ARGS)

baseline: ## writes down anew what the core does in these lives
	$(CARGO) run --release --locked -p tidepool-sim -- --record crates/sim/baseline.txt

mutations: ## whether the simulator notices each of the core's deliberate bugs; renews the table in docs/mutations.md
	@scripts/mutations.sh

mutants: ## every mutant of the core that cargo-mutants knows, against its tests and the simulator; goes on where it was interrupted
	command -v cargo-mutants >/dev/null || $(CARGO) install --locked cargo-mutants
	@scripts/mutants.py $(ARGS)

crash: deps ## a hundred rounds of kill -9 under load; ARGS="--backend rbd" on Ceph
	$(CARGO) build --release --locked -p tidepool
	$(CARGO) run --release --locked -p tidepool-tests --bin crash -- $(ARGS)

lost: deps ## thirty rounds in which the cache is destroyed under load; ARGS=--file without Ceph, ARGS=--postgres with a PostgreSQL on it (as root)
	$(CARGO) build --release --locked -p tidepool
	$(CARGO) run --release --locked -p tidepool-tests --bin lost -- $(ARGS)

pair: deps ## fifty rounds in which one of two hosts is lost under load, on Ceph; or a guest moves; ARGS=owner, peer-killed, peer-stopped, link, handoff-kill, takeover-kill, loss-kill, migration, guest or guest-elsewhere
	$(CARGO) build --release --locked -p tidepool
	$(CARGO) run --release --locked -p tidepool-tests --bin pair -- $(if $(ARGS),$(ARGS),owner)

fuzz: ## what takes bytes from elsewhere, guided by coverage, for HOURS hours; ARGS=cache_image for one target
	@scripts/fuzz.py --hours $(HOURS) $(ARGS)

guard: deps ## the stale-image guard against every kind of client, guests with the kernel's included
	$(CARGO) test --release --locked -p tidepool-tests --test guard -- --include-ignored

ceph18: ## every test program that uses Ceph, on Ceph 18, in a root of Debian 13 made for it (as root); ARGS="guard clones" for some
	@scripts/ceph18.sh $(ARGS)

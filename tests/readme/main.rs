//! The README as a new user lives it: its commands run as they stand there, on a real cluster, with
//! a virtual machine that boots from the image, writes to it, and reads it back.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tidepool_testkit::{Cluster, ClusterOptions, Scratch, daemon, need, one_at_a_time};
use tidepool_tests::document::{Host, commands, repository};
use tidepool_tests::rig::MIB;

/// Where the virtual machine writes, in sectors, and how much: the boot sector below has the same
/// numbers.
const FIRST_SECTOR: usize = 2048;
const WRITTEN_SECTORS: usize = 512;
/// What it writes.
const WRITTEN: u8 = 0x5a;

/// The whole virtual machine: a boot sector that writes, reads back, compares, and tells so on its
/// serial port.
const BOOT_SECTOR: &str = r#"
.code16
start:  xorw %ax, %ax
        movw %ax, %ds
        movw %ax, %es
        movw %ax, %ss
        movw $0x7c00, %sp
        cld
        movb %dl, drive
        movw $0x8000, %di
        movw $8192, %cx
        movb $0x5a, %al
        rep stosb
chunk:  movw $0x8000, buffer
        movw $0x4300, %ax
        call disk
        movw $0xa000, buffer
        movw $0x4200, %ax
        call disk
        movw $0x8000, %si
        movw $0xa000, %di
        movw $8192, %cx
        repe cmpsb
        jne failed
        addw $16, sector
        cmpw $2560, sector
        jb chunk
        movw $done, %si
        jmp tell
failed: movw $fail, %si
tell:   lodsb
        testb %al, %al
        jz stop
        movb %al, %bl
        movw $0x3fd, %dx
ready:  inb %dx, %al
        testb $0x20, %al
        jz ready
        movb %bl, %al
        movw $0x3f8, %dx
        outb %al, %dx
        jmp tell
stop:   hlt
        jmp stop
disk:   movb drive, %dl
        movw $packet, %si
        int $0x13
        jc failed
        ret
done:   .asciz "guest: done\n"
fail:   .asciz "guest: failed\n"
drive:  .byte 0
packet: .byte 16, 0
        .word 16
buffer: .word 0, 0
sector: .word 2048, 0, 0, 0
        .org 510
        .word 0xaa55
"#;

/// The disk image of the virtual machine.
fn boot_image(scratch: &Scratch) -> PathBuf {
    let (source, object, binary) =
        (scratch.join("boot.s"), scratch.join("boot.o"), scratch.join("boot"));
    fs::write(&source, BOOT_SECTOR).expect("write");
    let run = |command: &mut Command| {
        assert!(command.status().expect("binutils are installed").success())
    };
    run(Command::new("as").arg("--32").arg("-o").arg(&object).arg(&source));
    run(Command::new("ld")
        .args(["-m", "elf_i386", "-Ttext", "0x7c00", "--oformat", "binary", "-e", "0x7c00", "-o"])
        .arg(&binary)
        .arg(&object));
    assert_eq!(fs::metadata(&binary).expect("the boot sector").len(), 512);
    File::options()
        .write(true)
        .open(&binary)
        .and_then(|file| file.set_len(64 * MIB))
        .expect("its size");
    binary
}

/// What stands for the `cargo install` of the README where its compiling would take longer than all
/// the rest: the program that is compiled already comes to the same place. Any other command of
/// cargo fails.
const INSTALLER: &str = r#"#!/bin/sh
set -eu
[ "$*" = "install --quiet --locked --path crates/tidepool --root $HOME/.local" ]
mkdir -p "$HOME/.local/bin"
cp "$TIDEPOOL_BIN" "$HOME/.local/bin/tidepool"
"#;

#[test]
fn the_steps_of_the_readme_work_as_they_stand_there() {
    follow_the_readme(false);
}

#[test]
#[ignore = "compiles everything once more: make long"]
fn the_steps_of_the_readme_work_from_the_source_on() {
    follow_the_readme(true);
}

fn follow_the_readme(from_source: bool) {
    let _turn = one_at_a_time();
    need("qemu-system-x86_64", "qemu-system-x86").expect("installed");
    need("as", "binutils").expect("installed");
    let readme = fs::read_to_string(repository().join("README.md")).expect("the README");
    let blocks = commands(&readme, "## A first volume");
    assert!(blocks.len() >= 6, "the section has its commands: {blocks:?}");

    let cluster = Cluster::up(&ClusterOptions::for_tests()).expect("a cluster");
    let mut host = Host::new("readme", &["/run", "/var/cache"]);
    blocks.iter().for_each(|block| host.follow(block));
    let scratch = &host.scratch;
    cluster.rbd_import(&boot_image(scratch), "vm1").expect("the VM's image");
    fs::create_dir(scratch.join("home")).expect("a directory");
    let own_home = scratch.join("home").into_os_string();
    let program = std::env::current_exe().expect("this program");
    let target = program.ancestors().find(|path| path.join("deps").is_dir()).and_then(Path::parent);
    let home = PathBuf::from(std::env::var_os("HOME").expect("a home"));
    let of_home = |name: &str, directory| {
        std::env::var_os(name).unwrap_or_else(|| home.join(directory).into())
    };
    let mut path = std::env::var_os("PATH").expect("a path");
    if !from_source {
        let bin = scratch.join("installer");
        fs::create_dir(&bin).expect("a directory");
        fs::write(bin.join("cargo"), INSTALLER).expect("write");
        fs::set_permissions(bin.join("cargo"), fs::Permissions::from_mode(0o755))
            .expect("executable");
        path = [bin.into_os_string(), path].join(std::ffi::OsStr::new(":"));
    }
    let environment = [
        ("PATH", path),
        ("TIDEPOOL_BIN", daemon::tidepool().expect("the program").into()),
        ("CARGO_TARGET_DIR", target.expect("the target directory").into()),
        ("CARGO_HOME", of_home("CARGO_HOME", ".cargo")),
        ("RUSTUP_HOME", of_home("RUSTUP_HOME", ".rustup")),
        ("HOME", own_home),
    ];
    let log = host.run(&cluster, &environment);

    let export = host.scratch.join("export");
    cluster.rbd_export("vm1", &export).expect("the plain image");
    let image = fs::read(&export).expect("the plain image");
    let written = &image[FIRST_SECTOR * 512..(FIRST_SECTOR + WRITTEN_SECTORS) * 512];
    assert!(written.iter().all(|&byte| byte == WRITTEN), "the plain image has what the VM wrote");
    // While Ceph stood still the VM was served, and what it wrote was shown as not drained.
    let states: Vec<&str> = log.lines().filter(|line| line.starts_with("vm1")).collect();
    assert!(states.len() >= 2, "the status is shown before and while Ceph stands still:\n{log}");
    // A part of what was written before may still be on its way to the image.
    let exposure = states[1].split_whitespace().nth(4).and_then(|size| size.strip_suffix("KiB"));
    let exposed_kib = exposure.and_then(|kib| kib.parse::<u64>().ok());
    assert!(
        states[1].contains("write-back") && exposed_kib.is_some_and(|kib| kib >= 256),
        "{}",
        states[1]
    );
    let sum = cluster.rbd_checksum("vm1").expect("a checksum");
    assert!(log.contains(&sum), "the drained image was what the VM wrote:\n{log}");
    println!("{log}");
}

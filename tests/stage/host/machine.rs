//! A disposable copy of this machine, on which tests install packages and check the effects on a
//! system.
//!
//! The copy has this machine's files, and its own writes are only in memory. It runs systemd, even
//! if this machine does not, or no init, like an image that is being built. When the copy is
//! dropped, or when a test is killed, no file and no process of the copy remains.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::probe::die_with_us;
use crate::{Cgroup, eventually, program};

pub struct Machine {
    // Fields are dropped in this order, so each field is dropped before the fields that it uses.
    starter: Child,
    _cgroup: Cgroup,
    folder: tempfile::TempDir,
    process_1: String,
}

impl Machine {
    /// Starts a machine with systemd and waits for `basic.target`.
    #[track_caller]
    pub fn with_systemd() -> Self {
        let machine = Self::start("systemd");
        let booted = || machine.run(&["systemctl", "is-active", "basic.target"]).status.success();
        eventually("systemd is up", booted, |up| *up);
        machine
    }

    /// Starts a machine without an init.
    #[track_caller]
    pub fn without_systemd() -> Self {
        Self::start("nobody")
    }

    fn start(init: &str) -> Self {
        assert!(rustix::process::geteuid().is_root(), "package tests need root");
        let cgroup = Cgroup::new();
        let folder = tempfile::Builder::new().prefix("socklb-test-").tempdir().expect("make a folder");
        fs::create_dir(folder.path().join("shared")).expect("make the shared folder");
        let mut starter = Command::new(program("machine"));
        starter.arg(init).arg(folder.path()).arg(cgroup.path()).stdout(Stdio::piped());
        die_with_us(&mut starter);
        let mut starter = starter.spawn().expect("start the machine");
        let mut process_1 = String::new();
        let out = starter.stdout.take().expect("the output is piped");
        BufReader::new(out).read_line(&mut process_1).expect("the machine prints its process 1");
        let process_1 = process_1.trim().to_owned();
        let mut machine = Self { starter, _cgroup: cgroup, folder, process_1 };
        // Process 1 mounts the machine's files before it executes init.
        let init = if init == "systemd" { "/usr/lib/systemd/systemd\0" } else { "/usr/bin/sleep\0" };
        let command = format!("/proc/{}/cmdline", machine.process_1);
        let look = || {
            let ended = machine.starter.try_wait().expect("read the machine's status");
            assert!(ended.is_none(), "the machine ended: {ended:?}");
            fs::read_to_string(&command).unwrap_or_default()
        };
        eventually("the machine has an init", look, |line| line.starts_with(init));
        machine
    }

    /// The folder that the machine sees as `/shared`.
    pub fn shared(&self) -> PathBuf {
        self.folder.path().join("shared")
    }

    /// The path on the host of a file of the machine.
    pub fn file(&self, path: &str) -> PathBuf {
        Path::new("/proc").join(&self.process_1).join("root").join(path.trim_start_matches('/'))
    }

    #[track_caller]
    pub fn write(&self, path: &str, text: &str) {
        let path = self.file(path);
        fs::create_dir_all(path.parent().expect("a file has a folder")).expect("make the folder");
        fs::write(&path, text).unwrap_or_else(|error| panic!("write {}: {error}", path.display()));
    }

    /// Runs a command to its end, as root of the machine.
    #[track_caller]
    pub fn run(&self, command: &[&str]) -> Output {
        let mut enter = Command::new("nsenter");
        enter.args(["--target", &self.process_1, "--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup"]);
        enter.args(["--root", "--wd", "--"]).args(command);
        enter
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("DEBIAN_FRONTEND", "noninteractive");
        enter.stdin(Stdio::null()).output().expect("start nsenter")
    }

    /// Runs a command that must succeed and returns its output.
    #[track_caller]
    pub fn good(&self, command: &[&str]) -> String {
        let output = self.run(command);
        let error = String::from_utf8_lossy(&output.stderr);
        let text = String::from_utf8_lossy(&output.stdout).trim_end().to_owned();
        assert!(output.status.success(), "{}: {}\n{text}\n{error}", command.join(" "), output.status);
        text
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let journal = self.run(&["journalctl", "--no-pager", "--output=short-monotonic"]);
            eprintln!("--- the machine's journal ---\n{}", String::from_utf8_lossy(&journal.stdout));
        }
        // Process 1 dies with its starter, and all other processes of the machine die with process
        // 1.
        let _ = self.starter.kill();
        let _ = self.starter.wait();
    }
}

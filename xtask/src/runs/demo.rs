//! The demo: five backend processes, one client in a cgroup, socklb between them, and a live table.
//!
//! The demo creates files and a bpffs in the target folder, and a cgroup. It removes all of them at
//! the end. The backends and the client are processes of this binary (`processes`), so the demo
//! needs only a Rust toolchain.

mod processes;

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};

pub use self::processes::{BackendOptions, ClientOptions, backend, client};
use crate::command::{cargo, describe, root, run as run_command, target};
use crate::object;

/// `cargo xtask run`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Use kernel programs that write lines to the daemon's standard error, for developers of these
    /// programs; they are built separately from the shipped ones
    #[arg(long)]
    log_programs: bool,
    /// Run `socklb run` with these arguments instead of the demo
    #[arg(last = true)]
    daemon: Vec<String>,
}

/// The arguments with which cargo builds the installed program. The documentation states the same
/// command. With another choice of packages, cargo combines features differently, and compiles most
/// packages again.
pub const BUILD: [&str; 5] = ["build", "--release", "--package", "lb-user", "--locked"];

/// The five backends; `b3` has weight 3 in the endpoint file.
const BACKENDS: [(&str, &str); 5] = [
    ("b1", "127.0.0.1:18081"),
    ("b2", "127.0.0.1:18082"),
    ("b3", "127.0.0.1:18083"),
    ("b4", "127.0.0.1:18084"),
    ("b5", "127.0.0.1:18085"),
];
/// The service address of the example configuration.
const SERVICE: &str = "10.96.0.10:80";
/// The cgroup of the example configuration.
const CGROUP: &str = "socklb-demo";

/// `cargo xtask run`.
pub fn run(options: &Options) -> Result<()> {
    let mut build = cargo();
    build.args(BUILD);
    let mut folder = target();
    if options.log_programs {
        // The build goes to a separate folder, so that it is not mistaken for the shipped build.
        build.env("SOCKLB_LOGGING_OBJECTS", object::build_logging()?);
        folder = folder.join("log-programs");
        build
            .args(["--package", "lb-kernel", "--features", "lb-kernel/log-programs", "--target-dir"])
            .arg(&folder);
    }
    run_command(&mut build)?;
    let socklb = folder.join("release/socklb");
    if !options.daemon.is_empty() {
        let mut daemon = Command::new(&socklb);
        daemon.arg("run").args(&options.daemon);
        println!("$ {}", describe(&daemon));
        // The daemon replaces this process, so it receives the signals sent to this process, and
        // its exit code is the exit code of this command.
        return Err(daemon.exec()).context("start socklb");
    }
    if !rustix::process::geteuid().is_root() {
        bail!("the demo needs root: it creates a cgroup and loads kernel programs");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(Demo::new(&socklb)?.play())
}

struct Demo {
    socklb: PathBuf,
    /// The folder for the configuration, the log and the bpffs.
    folder: PathBuf,
    cgroup: PathBuf,
    children: Vec<(&'static str, Child)>,
    daemon: Option<Child>,
}

impl Demo {
    fn new(socklb: &Path) -> Result<Self> {
        let folder = target().join("demo");
        let mut demo = Self {
            socklb: socklb.to_owned(),
            folder,
            cgroup: cgroup2_mount()?.join(CGROUP),
            children: Vec::new(),
            daemon: None,
        };
        // An earlier demo that was killed may have left its mounts and its cgroup.
        demo.clean_up();
        Ok(demo)
    }

    async fn play(mut self) -> Result<()> {
        // The signal handlers are installed first, so that ^C at any later moment leads to the
        // clean-up.
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hangup = signal(SignalKind::hangup())?;
        let result = tokio::select! {
            result = self.show() => result,
            _ = interrupt.recv() => Ok(()),
            _ = terminate.recv() => Ok(()),
            _ = hangup.recv() => Ok(()),
        };
        println!("\nstopping the demo");
        self.clean_up();
        result
    }

    async fn show(&mut self) -> Result<()> {
        let started = Instant::now();
        self.set_the_stage()?;
        for (name, address) in BACKENDS {
            let backend = self.player(&["demo-backend", name, address])?;
            self.children.push((name, backend));
        }
        self.daemon = Some(self.start_daemon()?);
        self.wait_for_daemon().await?;
        let cgroup = self.cgroup.to_string_lossy().into_owned();
        let client = self.player(&["demo-client", &cgroup, SERVICE])?;
        self.children.push(("client", client));
        println!(
            "started in {} ms. Endpoints: {} (edit it and watch); log: {}; ^C ends it",
            started.elapsed().as_millis(),
            self.folder.join("users.toml").display(),
            self.folder.join("socklb.log").display(),
        );
        let mut table = self.socklb_command("status");
        table.args(["--watch", "1"]);
        let mut table = tokio::process::Command::from(table).kill_on_drop(true).spawn()?;
        if rustix::termios::isatty(io::stdout()) {
            // The table is drawn from the top of the screen, so the screen is cleared first.
            print!("\x1b[2J");
        }
        loop {
            tokio::select! {
                status = table.wait() => bail!("`socklb status --watch` ended: {}", status?),
                () = tokio::time::sleep(Duration::from_millis(500)) => self.everybody_plays()?,
            }
        }
    }

    /// Creates the configuration, a bpffs for the demo, and the cgroup.
    fn set_the_stage(&self) -> Result<()> {
        let bpffs = self.folder.join("bpf");
        fs::create_dir_all(&bpffs).with_context(|| format!("create {}", bpffs.display()))?;
        for name in ["socklb.toml", "users.toml"] {
            let from = root().join("examples/demo").join(name);
            fs::copy(&from, self.folder.join(name)).with_context(|| format!("copy {}", from.display()))?;
        }
        rustix::mount::mount("bpf", &bpffs, "bpf", rustix::mount::MountFlags::empty(), None)
            .with_context(|| format!("mount a bpf file system on {}", bpffs.display()))?;
        fs::create_dir_all(&self.cgroup).with_context(|| format!("create cgroup {}", self.cgroup.display()))
    }

    /// Starts this binary as one of the demo's processes.
    fn player(&self, arguments: &[&str]) -> Result<Child> {
        let mut player = Command::new(std::env::current_exe()?);
        player.args(arguments).stdin(Stdio::null());
        // In a separate process group, the new process does not receive ^C. Only the demo receives
        // ^C, and then ends the other processes in order.
        player.process_group(0).spawn().with_context(|| format!("start {}", arguments.join(" ")))
    }

    fn socklb_command(&self, command: &str) -> Command {
        let mut socklb = Command::new(&self.socklb);
        socklb.arg(command);
        for (flag, folder) in [("--pins", "bpf/socklb"), ("--run", "run"), ("--state", "state")] {
            socklb.arg(flag).arg(self.folder.join(folder));
        }
        socklb.process_group(0);
        socklb
    }

    fn start_daemon(&self) -> Result<Child> {
        let log = fs::File::create(self.folder.join("socklb.log"))?;
        let mut daemon = self.socklb_command("run");
        daemon.arg("--config").arg(self.folder.join("socklb.toml"));
        println!("$ {}", describe(&daemon));
        daemon.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn().context("start socklb")
    }

    /// Waits until the daemon's socket accepts connections.
    async fn wait_for_daemon(&mut self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(10);
        let socket = self.folder.join("run/socklb.sock");
        while Instant::now() < deadline {
            if let Some(daemon) = &mut self.daemon
                && let Some(status) = daemon.try_wait()?
            {
                bail!("socklb ended: {status}; its log:\n{}", self.log());
            }
            if tokio::net::UnixStream::connect(&socket).await.is_ok() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        bail!("socklb did not answer within ten seconds; its log:\n{}", self.log())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.join("socklb.log")).unwrap_or_default()
    }

    fn everybody_plays(&mut self) -> Result<()> {
        for (name, child) in &mut self.children {
            if let Some(status) = child.try_wait()? {
                bail!("{name} ended: {status}");
            }
        }
        if let Some(daemon) = &mut self.daemon
            && let Some(status) = daemon.try_wait()?
        {
            bail!("socklb ended: {status}; its log:\n{}", self.log());
        }
        Ok(())
    }

    /// Ends all processes, and removes the mounts and the cgroup. If a step fails, continues with
    /// the next one.
    fn clean_up(&mut self) {
        // The client is the last child. It must end first, because it reports the end of a backend
        // as an error.
        for (_, child) in self.children.iter_mut().rev() {
            let _ = end(child);
        }
        self.children.clear();
        if let Some(mut daemon) = self.daemon.take() {
            let _ = end(&mut daemon);
        }
        if self.folder.join("bpf/socklb").exists() {
            let mut detach = self.socklb_command("detach");
            let _ = detach.arg("--all").stdout(Stdio::null()).status();
        }
        let _ = rustix::mount::unmount(self.folder.join("bpf"), rustix::mount::UnmountFlags::DETACH);
        let _ = fs::remove_dir_all(&self.folder);
        let _ = fs::remove_dir(&self.cgroup);
    }
}

/// Sends SIGTERM to a child and waits for its end; kills a child that does not end.
fn end(child: &mut Child) -> io::Result<ExitStatus> {
    const PATIENCE: Duration = Duration::from_secs(5);
    let began = Instant::now();
    if child.try_wait()?.is_none()
        && let Some(pid) = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap_or(0))
    {
        rustix::process::kill_process(pid, Signal::TERM)?;
        while child.try_wait()?.is_none() {
            if began.elapsed() > PATIENCE {
                child.kill()?;
                break;
            }
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }
    child.wait()
}

/// The mount point of the file system of type cgroup2.
fn cgroup2_mount() -> Result<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let mounted = table.lines().find_map(|line| {
        let (mount, source) = line.split_once(" - ")?;
        if source.starts_with("cgroup2 ") { mount.split(' ').nth(4) } else { None }
    });
    let mounted = mounted.context("no cgroup2 is mounted: `mount -t cgroup2 none /sys/fs/cgroup/unified`")?;
    Ok(PathBuf::from(mounted))
}

#[cfg(test)]
mod tests {
    use super::BUILD;

    #[test]
    fn the_documentation_names_the_build_command_of_the_demo() {
        let command = format!("`cargo {}`", BUILD.join(" "));
        for page in ["README.md", "docs/guide/install.md"] {
            let text = std::fs::read_to_string(crate::command::root().join(page)).unwrap();
            assert!(text.contains(&command), "{page}");
            assert_eq!(text.matches("cargo build").count(), 1, "{page}");
        }
    }
}

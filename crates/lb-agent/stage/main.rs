//! The program that the tests run. `run` is `socklb agent run` with an agent that records the
//! reports it receives. `serve` is an application that records the signals it receives. Both write
//! their lines to the same file, so that the file shows their order.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread;

use anyhow::Context;
use clap::{Parser, Subcommand};
use lb_agent::reporter::ReadinessReporter;
use lb_agent::run::{Args, Signals};
use lb_core::service::Protocol;
use lb_report::wire::Readiness;
use tokio::signal::unix::{SignalKind, signal};

#[derive(Parser)]
struct Cli {
    /// File to which lines are appended
    log: PathBuf,
    /// Address of the backend
    address: SocketAddr,
    #[command(subcommand)]
    command: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Run a command as the backend
    Run(Args),
    /// Serve: send back all received bytes
    Serve {
        /// Continue after SIGTERM
        #[arg(long)]
        stubborn: bool,
        /// End, and leave the server behind in a process group of its own
        #[arg(long)]
        fork: bool,
    },
}

fn main() -> anyhow::Result<ExitCode> {
    let Cli { log, address, command } = Cli::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    match command {
        Role::Run(args) => {
            let status = runtime.block_on(async {
                let signals = Signals::take()?;
                anyhow::Ok(lb_agent::run::run(args, Protocol::Tcp, address, signals, Diary { log }).await)
            })?;
            Ok(status.end())
        }
        Role::Serve { stubborn, fork } => {
            if fork {
                let mut words = std::env::args_os().filter(|word| word != "--fork");
                let program = words.next().context("the first argument is missing")?;
                Command::new(program).args(words).process_group(0).spawn()?;
                return Ok(ExitCode::SUCCESS);
            }
            serve(&log, address)?;
            runtime.block_on(take_signals(&log, stubborn))
        }
    }
}

fn write(log: &Path, line: &str) -> anyhow::Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).open(log)?;
    // A single write, so that lines of several processes do not mix.
    file.write_all(format!("{line}\n").as_bytes())?;
    Ok(())
}

/// Records the reports that it receives. If a file `broken` exists in the directory of the log, a
/// report fails. If a file `unheard` exists there, one client has not acknowledged.
struct Diary {
    log: PathBuf,
}

impl ReadinessReporter for Diary {
    async fn report(&mut self, readiness: Readiness) -> anyhow::Result<()> {
        anyhow::ensure!(!self.log.with_file_name("broken").exists(), "the agent is broken");
        write(&self.log, &format!("reported {readiness:?}"))
    }

    async fn unacknowledged(&mut self) -> anyhow::Result<usize> {
        Ok(usize::from(self.log.with_file_name("unheard").exists()))
    }
}

fn serve(log: &Path, address: SocketAddr) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address).with_context(|| format!("listen at {address}"))?;
    write(log, &format!("app {}", std::process::id()))?;
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let mut bytes = [0; 1024];
                while let Ok(length @ 1..) = stream.read(&mut bytes) {
                    let _ = stream.write_all(&bytes[..length]);
                }
            });
        }
    });
    Ok(())
}

async fn take_signals(log: &Path, stubborn: bool) -> anyhow::Result<ExitCode> {
    // The signal SIGRTMIN + 3 of libc. systemd handles this signal itself.
    const REAL_TIME: i32 = 37;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut user1 = signal(SignalKind::user_defined1())?;
    let mut user2 = signal(SignalKind::user_defined2())?;
    let mut window = signal(SignalKind::window_change())?;
    let mut real_time = signal(SignalKind::from_raw(REAL_TIME))?;
    write(log, "app takes signals")?;
    loop {
        let name = tokio::select! {
            _ = terminate.recv() => "TERM",
            _ = interrupt.recv() => "INT",
            _ = hangup.recv() => "HUP",
            _ = user1.recv() => "USR1",
            _ = user2.recv() => "USR2",
            _ = window.recv() => "WINCH",
            _ = real_time.recv() => "37",
        };
        write(log, &format!("app got {name}"))?;
        if ["TERM", "INT"].contains(&name) && !stubborn {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

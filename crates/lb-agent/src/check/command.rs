//! A health check by a command. After its timeout, the command is killed with its process group.

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use lb_report::agent::streak::Outcome;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};

/// Runs a command to its end, or kills it after `timeout`.
pub async fn run(words: &[String], timeout: Duration) -> Outcome {
    let Some((program, arguments)) = words.split_first() else {
        return Outcome::Impossible("there is no command".to_owned());
    };
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = match command.process_group(0).spawn() {
        Ok(child) => child,
        Err(error) => return Outcome::Impossible(format!("start {program}: {error}")),
    };
    let mut running = RunningCommand(child);
    match tokio::time::timeout(timeout, running.0.wait()).await {
        Ok(Ok(status)) => judge(status),
        Ok(Err(error)) => Outcome::Impossible(format!("wait for {program}: {error}")),
        Err(_) => {
            running.kill();
            // The command is dead; this call reaps its process.
            let _ = running.0.wait().await;
            Outcome::Failed(format!(
                "the command did not end within {} and was killed",
                lb_document::in_units(timeout)
            ))
        }
    }
}

fn judge(status: ExitStatus) -> Outcome {
    match status.code() {
        Some(0) => Outcome::Passed,
        // Shells and env(1) return these codes if they cannot start a command.
        Some(code @ (126 | 127)) => {
            Outcome::Impossible(format!("exit code {code}: the command cannot be run"))
        }
        Some(code) => Outcome::Failed(format!("exit code {code}")),
        None => Outcome::Failed(status.to_string()),
    }
}

/// Kills the command when it is dropped, for example because the check was removed from the
/// configuration.
struct RunningCommand(Child);

impl RunningCommand {
    fn kill(&mut self) {
        // The process ID of the command, which is also the ID of its process group, is not reused
        // before waitpid(2) has reaped the command.
        let pid = self.0.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        if let Some(pid) = pid {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        self.kill();
    }
}

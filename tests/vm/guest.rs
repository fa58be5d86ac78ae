//! One boot of a guest: the emulator as a child process, its serial line as a stream of lines, its end as a result code
//! or as the way it was lost.

use std::fmt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{Instant, timeout, timeout_at};

/// What to boot.
pub struct Guest {
    /// For messages.
    pub name: String,
    /// The kernel's image.
    pub kernel: PathBuf,
    /// Its first and only root.
    pub initramfs: PathBuf,
    /// Arguments of the tests.
    pub arguments: Vec<String>,
    /// Variables of the tests.
    pub variables: Vec<String>,
    /// Where to keep what it prints.
    pub log: PathBuf,
    /// It hangs if it prints nothing for so long.
    pub silence: Duration,
    /// It is lost if it runs for so long.
    pub total: Duration,
    /// Show what it prints as it comes.
    pub live: bool,
}

/// How a boot ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Init left by the exit device with this code.
    Code(u8),
    /// The emulator ended without a code: the kernel panicked, or the emulator died.
    Died(String),
    /// It was killed because it printed nothing any more.
    Silent(Duration),
    /// It was killed because it did not come to an end.
    Late(Duration),
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "code {code:#x}"),
            Self::Died(status) => write!(f, "the emulator ended: {status}"),
            Self::Silent(time) => write!(f, "killed after {} s of silence", time.as_secs()),
            Self::Late(time) => write!(f, "killed after {} s", time.as_secs()),
        }
    }
}

/// A boot that is over.
pub struct Run {
    /// How.
    pub ended: Ended,
    /// What it printed.
    pub lines: Vec<String>,
}

impl Guest {
    /// Boots it and waits for its end.
    pub async fn run(&self) -> Result<Run> {
        let mut command = self.command(tsc_khz().await?);
        println!("$ {}", describe(command.as_std()));
        // Killed with us, should we be cut off.
        let mut child = command.kill_on_drop(true).spawn().context("start qemu-system-x86_64")?;
        let mut lines = Vec::new();
        let ended = match self.read(&mut child, &mut lines).await? {
            None => {
                let status = timeout(self.silence, child.wait()).await.context("the emulator's end")??;
                of_status(status)
            }
            Some(lost) => {
                child.kill().await.context("kill the emulator")?;
                lost
            }
        };
        Ok(Run { ended, lines })
    }

    /// No device but the serial line and the exit device.
    ///
    /// Mitigations stay on: with them, the verifier looks at paths that only a processor's guesses would take. But page
    /// tables are not switched at every system call, which is nothing to the verifier: an emulator forgets every
    /// translated address at each switch, and tests that read maps make hundreds of thousands of calls.
    ///
    /// Time is the host's: the emulated counter counts as the host's does. A kernel that finds out its speed while the
    /// host is busy gets it wrong by ten times, and a minute of patience is over in six seconds, so it is told. The
    /// emulated board's timer needs no speed to be known, but every look at it leaves the guest's code, which took a sixth
    /// of all the time.
    fn command(&self, tsc_khz: u64) -> Command {
        let speed = format!("tsc_early_khz={tsc_khz}");
        let mut words = vec!["console=ttyS0", "loglevel=5", "panic=-1", "tsc=reliable", &speed, "pti=off"];
        words.extend(self.variables.iter().map(String::as_str));
        words.push("--");
        words.extend(self.arguments.iter().map(String::as_str));
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-accel", "tcg,thread=multi", "-cpu", CPU, "-smp", "2", "-m", "2048"]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        command.arg("-kernel").arg(&self.kernel).arg("-initrd").arg(&self.initramfs);
        command.arg("-append").arg(words.join(" "));
        command.args(["-chardev", "stdio,id=serial,signal=off", "-serial", "chardev:serial"]);
        command.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=0x04"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command
    }

    /// Reads what it prints until it ends, or until patience does.
    async fn read(&self, child: &mut Child, lines: &mut Vec<String>) -> Result<Option<Ended>> {
        let mut serial = BufReader::new(child.stdout.take().expect("piped"));
        let log = tokio::fs::File::create(&self.log).await;
        let mut log = log.with_context(|| format!("write {}", self.log.display()))?;
        let end = Instant::now() + self.total;
        loop {
            let mut bytes = Vec::new();
            let wait = (Instant::now() + self.silence).min(end);
            match timeout_at(wait, serial.read_until(b'\n', &mut bytes)).await {
                Ok(length) => {
                    if length.context("read the serial line")? == 0 {
                        log.flush().await.context("write the log")?;
                        return Ok(None);
                    }
                }
                Err(_) if Instant::now() >= end => return Ok(Some(Ended::Late(self.total))),
                Err(_) => return Ok(Some(Ended::Silent(self.silence))),
            }
            log.write_all(&bytes).await.context("write the log")?;
            let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            if self.live {
                println!("[{}] {line}", self.name);
            }
            lines.push(line);
        }
    }
}

/// All that emulation knows, without what makes a real CPU faster and an emulated one three times slower: a fifth level
/// of page tables, copies byte by byte in one instruction, wide registers (which every process start uses to copy), and
/// checks of every access by protection keys and supervisor mode. Nothing of it is seen by programs or verifier.
const CPU: &str = "max,-la57,-erms,-fsrm,-avx,-avx2,-fma,-pku,-smap";

/// How fast the host's time stamp counter counts, in kHz: by comparison with its clock, to some millionths.
#[cfg(target_arch = "x86_64")]
async fn tsc_khz() -> Result<u64> {
    // SAFETY: every x86-64 processor has this instruction, and user space may use it unless a process forbids it to itself.
    let counter = || unsafe { std::arch::x86_64::_rdtsc() };
    let (began, first) = (Instant::now(), counter());
    tokio::time::sleep(Duration::from_millis(100)).await;
    let (took, last) = (began.elapsed(), counter());
    let khz = u128::from(last.wrapping_sub(first)) * 1_000_000 / took.as_nanos().max(1);
    u64::try_from(khz).context("the time stamp counter jumps")
}

/// Guests are of the host's architecture.
#[cfg(not(target_arch = "x86_64"))]
async fn tsc_khz() -> Result<u64> {
    anyhow::bail!("guests are x86-64, and so must the host be")
}

/// The exit device turns a code into twice the code plus one. The lowest codes look like an emulator that failed.
fn of_status(status: ExitStatus) -> Ended {
    match status.code() {
        Some(code) if code > 3 && code % 2 == 1 => {
            u8::try_from(code / 2).map_or_else(|_| Ended::Died(status.to_string()), Ended::Code)
        }
        _ => Ended::Died(status.to_string()),
    }
}

/// A command as one would type it.
fn describe(command: &std::process::Command) -> String {
    let quote = |word: &std::ffi::OsStr| {
        let word = word.to_string_lossy().into_owned();
        if word.contains(' ') { format!("'{word}'") } else { word }
    };
    let words: Vec<String> =
        std::iter::once(command.get_program()).chain(command.get_args()).map(quote).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn only_the_exit_device_gives_a_result() {
        let exited = |code: i32| of_status(ExitStatus::from_raw(code << 8));
        assert_eq!(exited(0x10 * 2 + 1), Ended::Code(0x10));
        assert_eq!(exited(0x11 * 2 + 1), Ended::Code(0x11));
        for lost in [0, 1, 3, 124] {
            assert!(matches!(exited(lost), Ended::Died(_)), "{lost}");
        }
        assert!(matches!(of_status(ExitStatus::from_raw(9)), Ended::Died(_)));
    }
}

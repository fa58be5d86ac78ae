//! One boot of a guest. The emulator is a child process, its serial line is a stream of lines, and
//! the end of the process is a result code, or the reason for the loss of the guest.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lb_suite::Event;

/// The properties of a guest to boot.
pub struct Guest {
    /// The name in messages.
    pub name: String,
    /// The kernel's image.
    pub kernel: PathBuf,
    /// The image of the root file system.
    pub initramfs: PathBuf,
    /// The number of CPUs.
    pub cpus: u32,
    /// Environment variables for the tests, as `NAME=VALUE`.
    pub variables: Vec<String>,
    /// File for the guest's output.
    pub log: PathBuf,
    /// The guest counts as hung if it prints nothing for this time.
    pub silence: Duration,
    /// The guest counts as lost if it runs for this time.
    pub total: Duration,
    /// Whether to print the guest's output as it arrives.
    pub live: bool,
}

/// The reason for the end of a boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Init left through the exit device with this code.
    Code(u8),
    /// The emulator ended without a code: the kernel panicked, or the emulator died.
    Died(String),
    /// The guest was killed because it printed nothing for this time.
    Silent(Duration),
    /// The guest was killed because it did not end within this time.
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

/// A boot that has ended.
pub struct Booted {
    pub ended: Ended,
    /// The lines that it printed.
    pub lines: Vec<String>,
}

impl Guest {
    /// Boots the guest and waits for its end.
    pub fn run(&self) -> Result<Booted> {
        let mut command = self.command(tsc_khz()?);
        println!("$ {}", describe(&command));
        let mut child = command.spawn().context("start qemu-system-x86_64")?;
        let mut lines = Vec::new();
        let lost = self.read(&mut child, &mut lines);
        if !matches!(lost, Ok(None)) {
            child.kill().context("kill the emulator")?;
        }
        let status = child.wait().context("wait for the emulator")?;
        Ok(Booted { ended: lost?.unwrap_or_else(|| of_status(status)), lines })
    }

    /// The command that starts the emulator. The guest has no device except the serial line and the
    /// exit device.
    ///
    /// Mitigations stay on, because with them the verifier checks paths that a processor executes
    /// only speculatively. Only the switch of page tables at every system call is off (`pti=off`).
    /// It does not affect the verifier, but an emulator discards every translated address at each
    /// switch, and tests that read maps make hundreds of thousands of calls.
    ///
    /// The guest uses the host's time: the emulated time stamp counter runs like the host's
    /// counter. A kernel that measures the counter's frequency while the host is busy can be wrong
    /// by a factor of ten, so that a time limit of a minute may end after six seconds. So the
    /// command line states the frequency.
    ///
    /// The kernel uses the counter and not the timer of the emulated board, because every read of
    /// that timer leaves the guest's code. These reads took a sixth of the total time.
    ///
    /// The kernel also does not test whether the timer's interrupts arrive (`no_timer_check`): the
    /// test waits for ten interrupts, and panics if the emulator on a busy host delivers fewer. A
    /// kernel that recognizes KVM also skips this test.
    fn command(&self, tsc_khz: u64) -> Command {
        let speed = format!("tsc_early_khz={tsc_khz}");
        let mut words = vec!["console=ttyS0", "loglevel=5", "panic=-1", "tsc=reliable", &speed, "pti=off"];
        words.push("no_timer_check");
        words.extend(self.variables.iter().map(String::as_str));
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-accel", "tcg,thread=multi", "-cpu", CPU, "-m", "2048"]);
        command.arg("-smp").arg(self.cpus.to_string());
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        command.arg("-kernel").arg(&self.kernel).arg("-initrd").arg(&self.initramfs);
        command.arg("-append").arg(words.join(" "));
        command.args(["-chardev", "stdio,id=serial,signal=off", "-serial", "chardev:serial"]);
        command.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=0x04"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command
    }

    /// Reads the guest's output until the guest ends or a time limit passes.
    fn read(&self, child: &mut Child, lines: &mut Vec<String>) -> Result<Option<Ended>> {
        let serial = BufReader::new(child.stdout.take().context("the emulator's output")?);
        let (sender, received) = mpsc::channel();
        // The thread ends with the emulator.
        std::thread::spawn(move || serial.split(b'\n').try_for_each(|line| sender.send(line)));
        let mut log = File::create(&self.log).with_context(|| format!("write {}", self.log.display()))?;
        let end = Instant::now() + self.total;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let bytes = match received.recv_timeout(self.silence.min(left)) {
                Ok(bytes) => bytes.context("read the serial line")?,
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) if left <= self.silence => {
                    return Ok(Some(Ended::Late(self.total)));
                }
                Err(RecvTimeoutError::Timeout) => return Ok(Some(Ended::Silent(self.silence))),
            };
            let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            writeln!(log, "{line}").with_context(|| format!("write {}", self.log.display()))?;
            if self.live {
                show(&self.name, &line);
            }
            lines.push(line);
        }
    }
}

/// Prints a line of the guest. An event is printed in a shorter form.
fn show(name: &str, line: &str) {
    match Event::of_line(line) {
        Some(Event::Test { event, name: test, exec_time, .. }) if event != "started" => {
            println!("[{name}] {test}: {event}, {exec_time:.1} s");
        }
        Some(_) => {}
        None => println!("[{name}] {line}"),
    }
}

/// The CPU with all features that the emulator supports, except those that make a real CPU faster
/// and an emulated CPU three times slower: a fifth level of page tables, copies byte by byte in one
/// instruction, wide registers (which every process start uses to copy), and checks of every access
/// by protection keys and supervisor mode. Neither programs nor the verifier depend on these
/// features.
const CPU: &str = "max,-la57,-erms,-fsrm,-avx,-avx2,-fma,-pku,-smap";

/// The frequency of the host's time stamp counter in kHz, measured against the host's clock, with
/// an error of some millionths.
#[cfg(target_arch = "x86_64")]
fn tsc_khz() -> Result<u64> {
    // SAFETY: every x86-64 processor has this instruction, and user space may use it unless a
    // process disables it for itself.
    let counter = || unsafe { std::arch::x86_64::_rdtsc() };
    let (began, first) = (Instant::now(), counter());
    while began.elapsed() < Duration::from_millis(100) {
        std::thread::park_timeout(Duration::from_millis(100));
    }
    let (took, last) = (began.elapsed(), counter());
    let khz = u128::from(last.wrapping_sub(first)) * 1_000_000 / took.as_nanos().max(1);
    u64::try_from(khz).context("the time stamp counter jumps")
}

/// This architecture has no guests.
#[cfg(not(target_arch = "x86_64"))]
fn tsc_khz() -> Result<u64> {
    anyhow::bail!("guests are x86-64, so the host must be x86-64")
}

/// The emulator's status is twice the guest's code plus one. The lowest codes are those of a failed
/// emulator.
fn of_status(status: ExitStatus) -> Ended {
    match status.code() {
        Some(code) if code > 3 && code % 2 == 1 => {
            u8::try_from(code / 2).map_or_else(|_| Ended::Died(status.to_string()), Ended::Code)
        }
        _ => Ended::Died(status.to_string()),
    }
}

/// The command line as text.
fn describe(command: &Command) -> String {
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

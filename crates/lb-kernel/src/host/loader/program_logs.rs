//! Writes the log lines of kernel programs to standard error when they arrive. Only builds for
//! developers of the programs contain this module.

use aya::Ebpf;
use aya_log::EbpfLogger;
use log::{Log, Metadata, Record};
use rustix::event::{PollFd, PollFlags, poll};

/// The logger that receives the lines.
struct Stderr;

impl Log for Stderr {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    #[expect(clippy::print_stderr, reason = "a build for developers")]
    fn log(&self, record: &Record<'_>) {
        eprintln!("kernel {} {}: {}", record.level(), record.target(), record.args());
    }

    fn flush(&self) {}
}

/// Writes the log lines of an object's programs to standard error until this process ends. The
/// writing runs in a separate thread, because lines can arrive at any time.
pub fn follow(object: &mut Ebpf) {
    let Ok(mut logger) = EbpfLogger::init_with_logger(object, Stderr) else { return };
    std::thread::spawn(move || {
        // Runs until the process ends.
        loop {
            logger.flush();
            let _ = poll(&mut [PollFd::new(&logger, PollFlags::IN)], None);
        }
    });
}

//! The lines that kernel programs write, in a build for whoever changes them: each to standard error, as it comes.

use aya::Ebpf;
use aya_log::EbpfLogger;
use log::{Log, Metadata, Record};
use rustix::event::{PollFd, PollFlags, poll};

/// Where lines go.
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

/// Writes the lines of an object's programs to standard error, until this process ends: by a thread of its own, since they come in the
/// middle of anything.
pub fn follow(object: &mut Ebpf) {
    let Ok(mut logger) = EbpfLogger::init_with_logger(object, Stderr) else { return };
    std::thread::spawn(move || {
        // Until the process ends.
        loop {
            logger.flush();
            let _ = poll(&mut [PollFd::new(&logger, PollFlags::IN)], None);
        }
    });
}

//! Where resident programs log: standard error, in the form that its reader takes.
//!
//! A service manager connects standard error to its journal and says so in `JOURNAL_STREAM` (systemd.exec(5)). The journal stamps each line
//! with the time, and takes a priority from `<N>` before it (sd-daemon(3)), so that `journalctl -p warning` works.

use std::fmt;
use std::io;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Logs from now on what `RUST_LOG` asks for, else what has at least the level INFO. `colour`: on a terminal that has colours.
pub fn init(colour: bool) {
    let filter = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    if is_journal(std::env::var("JOURNAL_STREAM").ok().as_deref(), rustix::fs::fstat(io::stderr()).ok()) {
        log.with_ansi(false).event_format(Journal(Format::default().without_time())).init();
    } else {
        log.with_ansi(colour).init();
    }
}

/// Whether a descriptor is the journal's. `stream`: the device and the inode of the journal's, as in `JOURNAL_STREAM`.
fn is_journal(stream: Option<&str>, descriptor: Option<rustix::fs::Stat>) -> bool {
    let numbers = stream.and_then(|stream| stream.split_once(':'));
    let numbers = numbers.and_then(|(device, inode)| Some((device.parse().ok()?, inode.parse().ok()?)));
    numbers.is_some_and(|numbers: (u64, u64)| {
        descriptor.is_some_and(|descriptor| (descriptor.st_dev, descriptor.st_ino) == numbers)
    })
}

/// Lines with a priority and without a time.
struct Journal(Format<Full, ()>);

impl<S, N> FormatEvent<S, N> for Journal
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        write!(writer, "<{}>", priority(*event.metadata().level()))?;
        self.0.format_event(context, writer, event)
    }
}

/// The priority of a level (syslog(3)).
const fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn a_descriptor_is_the_journals_if_its_numbers_are() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let stat = rustix::fs::fstat(&reader).unwrap();
        let of = |device: u64, inode: u64| is_journal(Some(&format!("{device}:{inode}")), Some(stat));
        assert!(of(stat.st_dev, stat.st_ino));
        assert!(!of(stat.st_dev, stat.st_ino + 1) && !of(stat.st_dev + 1, stat.st_ino));
        for wrong in ["", ":", "1", "x:y", "-1:2"] {
            assert!(!is_journal(Some(wrong), Some(stat)), "{wrong:?}");
        }
        assert!(!is_journal(None, Some(stat)) && !is_journal(Some("1:2"), None));
    }

    /// What is logged in a test.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_for_the_journal_have_a_priority_and_no_time() {
        let lines = Lines::default();
        let writer = lines.clone();
        let log = tracing_subscriber::fmt()
            .with_max_level(Level::TRACE)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .event_format(Journal(Format::default().without_time()))
            .finish();
        tracing::subscriber::with_default(log, || {
            tracing::error!("one");
            tracing::warn!(client = "web", "two");
            tracing::info!("three");
            tracing::debug!("four");
        });
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        let place = "lb_host::log::tests";
        assert_eq!(
            text,
            format!(
                "<3>ERROR {place}: one\n<4> WARN {place}: two client=\"web\"\n<6> INFO {place}: three\n<7>DEBUG {place}: four\n"
            )
        );
    }
}

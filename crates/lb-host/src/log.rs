//! Logging of the daemon and the agent to standard error, in the format that the journal or a
//! terminal expects.
//!
//! If standard error is a connection to the journal of a service manager, the manager has set
//! `JOURNAL_STREAM` (systemd.exec(5)). The journal adds the time to each line. The journal reads a
//! priority from `<N>` at the beginning of a line (sd-daemon(3)), so that `journalctl -p warning`
//! works.

use std::fmt;
use std::io;

use tracing::{Event, Level, Subscriber, warn};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::{Format, Json, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

/// Starts logging. `RUST_LOG` selects levels, as in `warn,lb_user=debug`; the default level is
/// INFO. `is_json`: log one JSON object per line. `colour`: colour the lines, unless they are JSON
/// or go to the journal.
pub fn init(is_json: bool, colour: bool) {
    let selected = std::env::var("RUST_LOG").unwrap_or_default();
    let (targets, wrong) = targets(&selected);
    let log = tracing_subscriber::fmt().with_max_level(LevelFilter::TRACE).with_writer(io::stderr);
    match (is_json, stderr_is_journal()) {
        (true, true) => {
            log.json().event_format(Journal(json().without_time())).finish().with(targets).init();
        }
        (true, false) => log.json().event_format(json()).finish().with(targets).init(),
        (false, true) => {
            let log = log.with_ansi(false).event_format(Journal(Format::default().without_time()));
            log.finish().with(targets).init();
        }
        (false, false) => log.with_ansi(colour).finish().with(targets).init(),
    }
    for part in wrong {
        warn!(part, "ignoring a part of RUST_LOG that is neither a level nor TARGET=LEVEL");
    }
}

/// Parses a list of levels. Also returns the parts that cannot be parsed.
fn targets(list: &str) -> (Targets, Vec<&str>) {
    let mut wrong = Vec::new();
    let mut targets = Targets::new().with_default(LevelFilter::INFO);
    for part in list.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        match part.parse::<Targets>() {
            Ok(parsed) => {
                if let Some(level) = parsed.default_level() {
                    targets = targets.with_default(level);
                }
                targets.extend(parsed);
            }
            Err(_) => wrong.push(part),
        }
    }
    (targets, wrong)
}

/// The format with one JSON object per event. The object contains the message and the fields of the
/// event.
fn json() -> Format<Json> {
    Format::default().json().flatten_event(true)
}

/// Whether a descriptor is connected to the journal. `stream` is the value of `JOURNAL_STREAM`: the
/// device and inode of the connection.
fn is_journal(stream: Option<&str>, descriptor: Option<rustix::fs::Stat>) -> bool {
    let numbers = stream.and_then(|stream| stream.split_once(':'));
    let numbers = numbers.and_then(|(device, inode)| Some((device.parse().ok()?, inode.parse().ok()?)));
    numbers.is_some_and(|numbers: (u64, u64)| {
        descriptor.is_some_and(|descriptor| (descriptor.st_dev, descriptor.st_ino) == numbers)
    })
}

/// Log lines in the format `F`, with a priority before each line.
struct Journal<F>(F);

impl<S, N, F> FormatEvent<S, N> for Journal<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut text = String::new();
        self.0.format_event(context, Writer::new(&mut text), event)?;
        writer.write_str(&prioritized(&text, priority(*event.metadata().level())))
    }
}

/// The text with a priority before each line, because the journal stores each line as a separate
/// entry.
fn prioritized(text: &str, priority: u8) -> String {
    text.lines().fold(String::new(), |all, line| all + &format!("<{priority}>{line}\n"))
}

/// The text of an error for standard error. If standard error is the journal, each line begins with
/// the priority of errors.
pub fn as_error(text: &str) -> String {
    if stderr_is_journal() { prioritized(text, priority(Level::ERROR)) } else { text.to_owned() }
}

fn stderr_is_journal() -> bool {
    is_journal(std::env::var("JOURNAL_STREAM").ok().as_deref(), rustix::fs::fstat(io::stderr()).ok())
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
    fn a_descriptor_is_the_journal_if_device_and_inode_match() {
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

    /// Collects the log of a test.
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

    /// Returns the output of `log` for three events.
    fn logged<L: Subscriber + Send + Sync>(log: impl FnOnce(Lines) -> L) -> String {
        let lines = Lines::default();
        tracing::subscriber::with_default(log(lines.clone()), || {
            tracing::error!("one");
            tracing::warn!(client = "web", open = 3, "two");
            tracing::debug!("three");
        });
        let bytes = lines.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn levels_are_selected_by_target_and_info_is_the_level_of_others() {
        let enabled = |list: &str| {
            let (targets, wrong) = targets(list);
            let levels = ["lb_user::api", "tokio"].map(|target| {
                [Level::TRACE, Level::DEBUG, Level::INFO, Level::WARN, Level::ERROR]
                    .into_iter()
                    .find(|level| targets.would_enable(target, level))
            });
            (levels, wrong.join(" "))
        };
        for (list, expected) in [
            ("", ([Some(Level::INFO); 2], "")),
            ("warn", ([Some(Level::WARN); 2], "")),
            ("lb_user=debug", ([Some(Level::DEBUG), Some(Level::INFO)], "")),
            ("error, lb_user::api=trace", ([Some(Level::TRACE), Some(Level::ERROR)], "")),
            ("off", ([None; 2], "")),
            ("lb_user=loud,warn", ([Some(Level::WARN); 2], "lb_user=loud")),
        ] {
            assert_eq!(enabled(list), (expected.0, expected.1.to_owned()), "{list}");
        }
    }

    #[test]
    fn each_line_of_a_text_has_the_priority() {
        assert_eq!(prioritized("one\n two\n", priority(Level::WARN)), "<4>one\n<4> two\n");
        assert_eq!(prioritized("", priority(Level::WARN)), "");
    }

    #[test]
    fn lines_for_the_journal_have_a_priority_and_no_time() {
        let text = logged(|lines| {
            let log = tracing_subscriber::fmt().with_max_level(Level::TRACE).with_ansi(false);
            let log = log.with_writer(move || lines.clone());
            log.event_format(Journal(Format::default().without_time())).finish()
        });
        let place = "lb_host::log::tests";
        let expected = format!(
            "<3>ERROR {place}: one\n<4> WARN {place}: two client=\"web\" open=3\n<7>DEBUG {place}: three\n"
        );
        assert_eq!(text, expected);
    }

    #[test]
    fn lines_of_json_are_objects_with_each_field_by_its_name() {
        let place = "lb_host::log::tests";
        let of =
            |level: &str, rest: &str| format!("{{\"level\":\"{level}\",{rest},\"target\":\"{place}\"}}\n");
        let text = logged(|lines| {
            let log = tracing_subscriber::fmt().with_max_level(Level::TRACE).json();
            log.with_writer(move || lines.clone()).event_format(Journal(json().without_time())).finish()
        });
        let expected = [
            "<3>".to_owned() + &of("ERROR", "\"message\":\"one\""),
            "<4>".to_owned() + &of("WARN", "\"message\":\"two\",\"client\":\"web\",\"open\":3"),
            "<7>".to_owned() + &of("DEBUG", "\"message\":\"three\""),
        ];
        assert_eq!(text, expected.concat());
        let text = logged(|lines| {
            let log = tracing_subscriber::fmt().json().with_writer(move || lines.clone());
            log.event_format(json()).finish()
        });
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.lines().all(|line| line.starts_with("{\"timestamp\":\"20")), "{text}");
    }
}

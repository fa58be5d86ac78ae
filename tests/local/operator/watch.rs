//! `status --watch` on a terminal: the view fits the screen, keys and signals work, and the
//! terminal is restored.

use std::os::unix::process::ExitStatusExt;

use rustix::process::Signal;
use stage::daemon::signal;
use stage::eventually;
use stage::fixture::Fixture;
use stage::terminal::Terminal;

/// `status --watch` of a set-up, after its first screen.
fn watching(fixture: &Fixture, columns: u16, rows: u16) -> Terminal {
    let command = fixture.setup.socklb(&["status", "web", "--watch"]);
    let terminal = Terminal::start(command, columns, rows);
    terminal.shows("the status is shown", |rows| rows.iter().any(|row| row.starts_with("socklb ")));
    assert!(terminal.is_taken() && terminal.is_raw());
    terminal
}

#[test]
fn every_end_and_stop_of_watch_restores_the_terminal() {
    let fixture = Fixture::new();
    let check = |end: &dyn Fn(&mut Terminal), code: i32| {
        let mut terminal = watching(&fixture, 100, 24);
        end(&mut terminal);
        let ended = terminal.ended();
        assert_eq!((ended.code(), ended.signal()), (Some(code), None));
        eventually("the screen is restored", || terminal.is_taken(), |is_taken| !is_taken);
        assert!(!terminal.is_raw());
    };
    check(&|terminal| terminal.types("q"), 0);
    // ^C and ^\ on the terminal are signals.
    check(&|terminal| terminal.types("\x03"), 128 + Signal::INT.as_raw());
    check(&|terminal| terminal.types("\x1c"), 128 + Signal::QUIT.as_raw());
    for end in [Signal::TERM, Signal::HUP] {
        check(&|terminal| signal(terminal.program(), end), 128 + end.as_raw());
    }
    // The terminal is also restored while the command is stopped.
    let mut terminal = watching(&fixture, 100, 24);
    let is_stopped = |terminal: &Terminal| {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", terminal.program().id())).expect("read");
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    };
    terminal.types("\x1a");
    eventually("the command is stopped", || is_stopped(&terminal), |is_stopped| *is_stopped);
    eventually("the screen is restored", || terminal.is_taken(), |is_taken| !is_taken);
    assert!(!terminal.is_raw());
    signal(terminal.program(), Signal::CONT);
    eventually("the screen is taken again", || terminal.is_taken(), |is_taken| *is_taken);
    terminal.types("q");
    assert_eq!(terminal.ended().code(), Some(0));
    eventually("the screen is restored", || terminal.is_taken(), |is_taken| !is_taken);
    assert!(!terminal.is_raw());
    // The command reports a misspelt name before it switches to the alternate screen.
    let mut terminal = Terminal::start(fixture.setup.socklb(&["status", "wep", "--watch"]), 100, 24);
    assert_eq!(terminal.ended().code(), Some(1));
    assert_eq!(terminal.written(), "");
}

#[test]
fn the_view_fits_the_terminal_and_shows_failed_reads() {
    let mut fixture = Fixture::new();
    let mut terminal = watching(&fixture, 120, 24);
    let whole =
        terminal.shows("the whole status", |rows| rows.iter().any(|row| row.contains("127.0.0.1:8003")));
    assert!(whole[5].ends_with("p99"), "{whole:#?}");
    terminal.resize(60, 24);
    let narrow = terminal
        .shows("columns are left out", |rows| rows.iter().any(|row| row.starts_with("(narrow terminal: ")));
    assert!(narrow.iter().all(|row| row.chars().count() <= 60), "{narrow:#?}");
    terminal.resize(120, 4);
    let expected = [&whole[..3], &[format!("... {} more lines", whole.len() - 3)]].concat();
    terminal.shows("the first three rows", |rows| rows == expected);
    terminal.types("\x1b[B");
    let last = format!("... {} more lines, 1 above", whole.len() - 4);
    let expected = [&whole[1..4], &[last]].concat();
    terminal.shows("the rows after scrolling by one", |rows| rows == expected);
    terminal.types("G");
    let last = format!("... the end, {} above", whole.len() - 3);
    terminal.shows("the last rows", |rows| rows.last() == Some(&last));
    terminal.resize(120, 24);
    terminal.shows("the whole status again", |rows| rows.len() == whole.len());
    fixture.stop();
    terminal.shows("the row that reports a missing daemon", |rows| rows[0].starts_with("no daemon answers"));
    assert!(fixture.setup.run(&["detach", "web"]).status.success());
    let error = "not up to date, retrying: there is no client \"web\" here";
    let rows = terminal.shows("the error below the last status", |rows| {
        rows.last().is_some_and(|row| row.starts_with(error))
    });
    assert!(
        rows.iter().any(|row| row.contains("127.0.0.1:8001")),
        "the last status remains on the screen: {rows:#?}"
    );
    fixture.start();
    terminal.shows("the status of the restarted daemon", |rows| {
        rows[0].starts_with("socklb ") && !rows.iter().any(|row| row.contains("not up to date"))
    });
    terminal.types("q");
    assert_eq!(terminal.ended().code(), Some(0));
}

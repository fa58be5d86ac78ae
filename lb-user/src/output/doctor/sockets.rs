//! Examines sockets of a client's processes that the client's programs do not cover.

use std::collections::BTreeMap;

use lb_kernel::{Sockets, Uncovered};
use lb_view::diagnosis::{Diagnosis, Severity};
use lb_view::text::counted;

use super::AS_ROOT;

/// The maximum number of findings about single sockets of one client. A process that has received
/// thousands of sockets from another process is one fault, not thousands.
const SHOWN: usize = 20;

/// The help for a process that uses a socket from another process.
const HELP: &str = "let the process create its sockets itself, in its own cgroup";

/// Reports the sockets of a client that no program covers.
pub fn uncovered(diagnosis: &mut Diagnosis, name: &str, sockets: &Sockets) {
    let good = format!(
        "client {name}: every TCP socket of its processes that is connected or listens is covered; the kernel does not list \
         other sockets, so a socket that was created elsewhere and has not connected yet cannot be found"
    );
    report_sockets(diagnosis, &format!("client {name}"), sockets, &good, HELP);
}

/// Reports each uncovered socket of a client or a process, with `help`; reports `good` if no socket
/// is uncovered.
pub fn report_sockets(diagnosis: &mut Diagnosis, subject: &str, sockets: &Sockets, good: &str, help: &str) {
    let Sockets { uncovered, unseen } = sockets;
    // After a fork, several processes share a socket.
    let mut found: BTreeMap<u32, Vec<&Uncovered>> = BTreeMap::new();
    for socket in uncovered {
        found.entry(socket.inode).or_default().push(socket);
    }
    // Connected sockets come first, because a socket that only listens makes no connects.
    let (dialling, listening): (Vec<_>, Vec<_>) =
        found.into_values().partition(|holders| holders.iter().any(|socket| !socket.listens));
    for holders in dialling.iter().chain(&listening).take(SHOWN) {
        one(diagnosis, subject, holders, help);
    }
    let more_listening = listening.len().saturating_sub(SHOWN.saturating_sub(dialling.len()));
    for (state, more, what) in [
        (Severity::Warning, dialling.len().saturating_sub(SHOWN), "connected"),
        (Severity::Note, more_listening, "listening"),
    ] {
        if more > 0 {
            let text = format!("{subject}: {} not covered ({what})", counted(more, "more socket"));
            diagnosis.add("sockets", state, text, None);
        }
    }
    if !unseen.is_empty() {
        let text = format!(
            "{subject}: cannot see the sockets of {}",
            match unseen.len() {
                1 => "1 process".to_owned(),
                processes => format!("{processes} processes"),
            }
        );
        diagnosis.add("sockets", Severity::Note, text, Some(AS_ROOT));
    } else if uncovered.is_empty() {
        diagnosis.ok("sockets", good);
    }
}

/// Reports one socket, which all processes in `holders` share.
fn one(diagnosis: &mut Diagnosis, subject: &str, holders: &[&Uncovered], help: &str) {
    let Some(socket) = holders.first() else { return };
    let made_in = match &socket.made_in {
        // The name is escaped, because any process that may create cgroups chooses their names.
        Some(path) => format!("created in {}", path.to_string_lossy().escape_debug()),
        None => "created in a cgroup that no longer exists".to_owned(),
    };
    let (state, what, help) = match socket.peer {
        _ if socket.listens => (Severity::Note, "it only listens, so it makes no connects".to_owned(), None),
        Some(peer) => (Severity::Warning, format!("it is connected to {peer}"), Some(help)),
        None => (Severity::Warning, "it sends datagrams".to_owned(), Some(help)),
    };
    let text = format!(
        "{subject}: socket {} of {} is not covered: {made_in}; {what}",
        socket.inode,
        holders_text(holders)
    );
    diagnosis.add("sockets", state, text, help);
}

fn holders_text(holders: &[&Uncovered]) -> String {
    /// The largest number of processes in a finding: a server may have forked hundreds.
    const NAMED: usize = 5;
    let named = holders.iter().take(NAMED).map(|holder| format!("{} (pid {})", holder.process, holder.pid));
    let mut text = named.collect::<Vec<_>>().join(", ");
    if let Some(more) = holders.len().checked_sub(NAMED + 1) {
        text.push_str(&format!(" and {} more", more + 1));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket(inode: u32, is_connected: bool) -> Uncovered {
        Uncovered {
            pid: inode,
            process: "web".to_owned(),
            inode,
            made_in: None,
            listens: !is_connected,
            peer: is_connected.then(|| "10.0.0.1:80".parse().unwrap()),
        }
    }

    #[test]
    fn processes_that_share_a_socket_are_named_together() {
        let all: Vec<Uncovered> = (1..=7).map(|pid| socket(pid, false)).collect();
        let text = |count: usize| holders_text(&all.iter().take(count).collect::<Vec<_>>());
        assert_eq!(text(2), "web (pid 1), web (pid 2)");
        assert_eq!(text(5), "web (pid 1), web (pid 2), web (pid 3), web (pid 4), web (pid 5)");
        assert_eq!(text(7), "web (pid 1), web (pid 2), web (pid 3), web (pid 4), web (pid 5) and 2 more");
    }

    /// Checks the number of findings of each severity, and the text that counts sockets without a
    /// finding of their own.
    #[track_caller]
    fn check(connected: u32, listening: u32, expected: (usize, usize), more: &[&str]) {
        let mut uncovered: Vec<Uncovered> = (0..listening).map(|inode| socket(inode, false)).collect();
        uncovered.extend((0..connected).map(|n| socket(1000 + n, true)));
        let mut diagnosis = Diagnosis { schema: 1, findings: Vec::new() };
        super::uncovered(&mut diagnosis, "web", &Sockets { uncovered, unseen: Vec::new() });
        let of = |state| diagnosis.findings.iter().filter(|finding| finding.state == state).count();
        assert_eq!((of(Severity::Warning), of(Severity::Note)), expected);
        let texts = diagnosis.findings.iter().map(|finding| finding.text.as_str());
        let lines: Vec<&str> = texts.filter(|text| text.contains("more socket")).collect();
        assert_eq!(lines, more);
    }

    #[test]
    fn sockets_past_the_limit_are_counted_by_kind() {
        check(0, 20, (0, 20), &[]);
        check(0, 21, (0, 21), &["client web: 1 more socket not covered (listening)"]);
        check(21, 0, (21, 0), &["client web: 1 more socket not covered (connected)"]);
        check(1, 30, (1, 20), &["client web: 11 more sockets not covered (listening)"]);
        check(
            25,
            2,
            (21, 1),
            &[
                "client web: 5 more sockets not covered (connected)",
                "client web: 2 more sockets not covered (listening)",
            ],
        );
    }
}

//! Examines other programs on a client's cgroup or above it.

use lb_kernel::{Cgroup, Neighbour, Pinned, Pins};
use lb_view::diagnosis::{Diagnosis, Severity};

use super::AS_ROOT;
use crate::config::Paths;

/// Reports the other programs that run for a client's sockets.
pub fn others(diagnosis: &mut Diagnosis, name: &str, paths: &Paths, pins: &Pins, cgroup: &Cgroup) {
    let neighbours = match lb_kernel::neighbours(pins, &Pinned::below(&paths.pins), &cgroup.path) {
        Ok(neighbours) => neighbours,
        Err(error) => {
            let text = format!("client {name}: {}", crate::error::chain(&error));
            diagnosis.add("other programs", Severity::Note, text, Some(AS_ROOT));
            return;
        }
    };
    if neighbours.is_empty() {
        diagnosis.ok("other programs", format!("client {name}: none of others on its cgroup or above"));
    }
    for neighbour in &neighbours {
        let program = neighbour.name.as_deref().unwrap_or("unnamed");
        let text = format!(
            "client {name}: {} program {program} (id {}) on {} runs {}",
            neighbour.hook,
            neighbour.program,
            neighbour.cgroup.display(),
            order(neighbour)
        );
        if neighbour.is_socklb {
            let text =
                format!("{text}. It is socklb's, and no pin below {} leads to it", paths.pins.display());
            diagnosis.add(
                "other programs",
                Severity::Warning,
                text,
                Some(&where_it_may_be_pinned(neighbour)),
            );
        } else {
            let help = format!("bpftool prog show id {}", neighbour.program);
            diagnosis.add("other programs", Severity::Note, text, Some(&help));
        }
    }
}

/// When a program runs, and what this means at its hook.
fn order(neighbour: &Neighbour) -> &'static str {
    let hook = neighbour.hook.as_str();
    let chooses = hook.starts_with("connect") || hook.starts_with("sendmsg");
    match (neighbour.runs_after_ours, hook) {
        (true, _) if chooses => {
            "after ours: it sees the backend as the destination, and what it writes is dialled"
        }
        (false, _) if chooses => "before ours: what it writes is looked up among the services",
        (true, "sock_ops") => {
            "after ours: where it sets the socket's callback flags without those that are set, ours sees no end of the \
             connection"
        }
        (false, "sock_ops") => {
            "before ours: where it sets the socket's callback flags later, ours sees no end of the connection"
        }
        (_, "sock_release") => "as well as ours; neither changes what the other sees",
        (true, _) => "after ours: it sees the service's address, and what it writes is told the application",
        (false, _) => "before ours: what it writes is compared with the backends",
    }
}

/// How to find the pins that hold a program of socklb. Without the pins it cannot be removed.
fn where_it_may_be_pinned(neighbour: &Neighbour) -> String {
    format!(
        "another socklb with other --pins has it, or its pins were moved: find them with `find / -name \
         '{}@*'`, and remove them with `socklb detach --all --pins DIR`",
        if neighbour.hook == "sock_ops" { "connect4" } else { &neighbour.hook }
    )
}

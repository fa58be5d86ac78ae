//! Examines programs of other systems on a client's cgroup, or on a cgroup above it.

use lb_kernel::{Cgroup, Neighbour, Pinned, Pins};
use lb_view::diagnosis::{Diagnosis, Severity};

use super::AS_ROOT;
use crate::config::Paths;

/// Reports the other programs that the kernel runs for a client's sockets.
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
        diagnosis.ok("other programs", format!("client {name}: no other programs on its cgroup or above it"));
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
            let text = format!(
                "{text}. The program belongs to socklb, and no pin below {} refers to it",
                paths.pins.display()
            );
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

/// Describes whether a program runs before or after socklb's program, and the effect of this order
/// at the hook.
fn order(neighbour: &Neighbour) -> &'static str {
    let hook = neighbour.hook.as_str();
    let chooses = hook.starts_with("connect") || hook.starts_with("sendmsg");
    match (neighbour.runs_after_ours, hook) {
        (true, _) if chooses => {
            "after socklb's: it sees the backend as the destination, and can replace this destination"
        }
        (false, _) if chooses => {
            "before socklb's: it can replace the destination before socklb looks up the service"
        }
        (true, "sock_ops") => {
            "after socklb's: if it overwrites the socket's callback flags, socklb does not see the end of \
             the connection"
        }
        (false, "sock_ops") => {
            "before socklb's: if it overwrites the socket's callback flags later, socklb does not see the end of the connection"
        }
        (_, "sock_release") => "before or after socklb's: neither program changes the other program's input",
        (true, _) => {
            "after socklb's: it sees the service's address, and can replace the address that the application \
             receives"
        }
        (false, _) => {
            "before socklb's: it can replace the address before socklb compares it with the backends"
        }
    }
}

/// The help for a program of socklb with unknown pins. The program stays attached until its pins
/// are removed.
fn where_it_may_be_pinned(neighbour: &Neighbour) -> String {
    format!(
        "another socklb with other --pins has attached it, or its pins were moved: find the pins with `find / -name \
         '{}@*'`, and remove them with `socklb detach --all --pins DIR`",
        if neighbour.hook == "sock_ops" { "connect4" } else { &neighbour.hook }
    )
}

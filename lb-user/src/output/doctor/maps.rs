//! Examines a client's maps: how full they are, and whether they contain counts of events that
//! should not happen.

use lb_kernel::{Fullness, Pins, Tables};
use lb_view::diagnosis::{Diagnosis, Severity};
use lb_view::status::AnomalyCounts;

/// Reports how full a client's maps are. On a kernel without compare-and-swap, the overflow table
/// contains all flows, and `has_two_tables` is `false`.
pub fn usage(diagnosis: &mut Diagnosis, name: &str, pins: &Pins, has_two_tables: bool) {
    let Ok([entries, slots, records, overflow, datagrams]) =
        Tables::open(pins, false).and_then(|tables| tables.fullness())
    else {
        return;
    };
    let detach = pins.detach_command();
    let mut full = |limit: &str, used: u64, of: u64, what: &str| {
        full(diagnosis, name, &detach, limit, (used, of), what);
    };
    for Fullness { map, used, capacity } in [entries, slots] {
        full(map, used, capacity, map);
    }
    let (limit, places) = (records.map, records.capacity);
    let flows = records.used + overflow.used;
    if has_two_tables {
        // The overflow table has room for as many flows as the flow table. It stores a flow if the
        // flow's bucket in the flow table is occupied.
        let what = format!("{limit} ({places}, and the same number in the overflow table)");
        full(limit, flows, places.saturating_mul(2), &what);
    } else {
        full(limit, flows, places, limit);
    }
    // If `flow_overflow` or `datagrams` is full, further flows are still balanced, but untracked.
    let collisions = "flow_overflow: flows whose bucket in the flow table was occupied";
    full(limit, overflow.used, overflow.capacity, collisions);
    let datagrams_of = "datagrams: sockets that send datagrams without connecting";
    full(limit, datagrams.used, datagrams.capacity, datagrams_of);
}

/// Reports how full one map of a client is, and which limit to raise if it is more than 90 % full.
fn full(
    diagnosis: &mut Diagnosis,
    name: &str,
    detach: &str,
    limit: &str,
    (used, of): (u64, u64),
    what: &str,
) {
    let text = format!("client {name}: {used} of {of} {what}");
    if used.saturating_mul(10) > of.saturating_mul(9) {
        let help =
            format!("raise limits.{limit}, stop the daemon, run `{detach}`, and start the daemon again");
        diagnosis.add("limits", Severity::Warning, text, Some(&help));
    } else {
        diagnosis.ok("limits", text);
    }
}

/// Reports events that should not have happened. The counts of flows are still right, and the
/// finding therefore has no help.
pub fn anomalies(diagnosis: &mut Diagnosis, name: &str, pins: &Pins) {
    let Ok(anomalies) = Tables::open(pins, false).and_then(|tables| tables.anomalies()) else { return };
    let AnomalyCounts { close_without_record, established_out_of_turn, ended_twice, release_out_of_turn } =
        anomalies.into();
    let counted = [
        (close_without_record, "sockets of flows were closed without a record"),
        (established_out_of_turn, "flows were established, but were not in the phase `connecting` before"),
        (ended_twice, "flows were ended by two programs at the same time"),
        (
            release_out_of_turn,
            "sockets with closed connections were released, but no program had ended their flows",
        ),
    ];
    let seen: Vec<String> = counted
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{count} {what}"))
        .collect();
    if seen.is_empty() {
        diagnosis.ok("anomalies", format!("client {name}: none"));
    } else {
        diagnosis.add("anomalies", Severity::Note, format!("client {name}: {}", seen.join("; ")), None);
    }
}

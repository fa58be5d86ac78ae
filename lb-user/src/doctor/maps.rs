//! Examines a client's maps: how full they are, and whether they have counted events that should
//! not happen.

use lb_kernel::{Fullness, Pins, Tables};
use lb_view::diagnosis::{Diagnosis, Severity};
use lb_view::status::AnomalyCounts;

/// How full a client's maps are. Without compare-and-swap all flows are in the table of collisions.
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
        // The table of collisions has room for as many flows again, for those whose place is taken.
        let what = format!("{limit} ({places}, and as many again on collisions)");
        full(limit, flows, places.saturating_mul(2), &what);
    } else {
        full(limit, flows, places, limit);
    }
    // If one of these maps is full, further flows are still balanced, but are in no active count.
    let collisions = "flow_overflow: flows whose place in the flow table is another's";
    full(limit, overflow.used, overflow.capacity, collisions);
    let datagrams_of = "datagrams: sockets that address their datagrams";
    full(limit, datagrams.used, datagrams.capacity, datagrams_of);
}

/// How full one map of a client is, and which limit to raise if it is nearly full.
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
        let help = format!("raise limits.{limit}, then `{detach}` and start the daemon again");
        diagnosis.add("limits", Severity::Warning, text, Some(&help));
    } else {
        diagnosis.ok("limits", text);
    }
}

/// Events that should not happen but did. The counts are still right, so nothing needs to be done.
pub fn anomalies(diagnosis: &mut Diagnosis, name: &str, pins: &Pins) {
    let Ok(anomalies) = Tables::open(pins, false).and_then(|tables| tables.anomalies()) else { return };
    let AnomalyCounts { close_without_record, established_out_of_turn, ended_twice, release_out_of_turn } =
        anomalies.into();
    let counted = [
        (close_without_record, "sockets closed as a flow's without a record"),
        (established_out_of_turn, "flows were established before a SYN was seen"),
        (ended_twice, "records were ended twice at a time"),
        (release_out_of_turn, "sockets were closed whose end should have been seen before"),
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

//! The entries of a schedule at which the cursors of CPUs start.
//!
//! Every connect takes the next entry of its CPU's cursor. The starts differ, so that the first
//! connects of all CPUs and hosts do not go to the same backend, for example after a restart of a
//! whole fleet.

/// The start of a CPU's cursor, as a fraction of the table in units of 2^-32: a hash of the client
/// task and the service, plus `cpu / cpus`.
///
/// `task` distinguishes client tasks, including those of different hosts that share a job and an
/// index by mistake.
pub fn start(task: &str, service: &str, cpu: u32, cpus: u32) -> u32 {
    let hash = xxhash_rust::xxh64::xxh64(task.as_bytes(), xxhash_rust::xxh64::xxh64(service.as_bytes(), 0));
    // The high half of the hash is the fraction. A short table uses only the high bits of the
    // fraction.
    let base = u32::try_from(hash >> 32).expect("the high half has 32 bits");
    let step = (u64::from(cpu) << 32) / u64::from(cpus.max(1));
    base.wrapping_add(u32::try_from(step & 0xffff_ffff).expect("the mask leaves 32 bits"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lb_common::abi::Cursor;
    use lb_common::pick::position;

    #[test]
    fn starts_of_cpus_are_evenly_spread_in_tables_of_any_length() {
        for log2 in [10u8, 12, 16] {
            let length = 1u32 << log2;
            let starts: Vec<u32> = (0..4)
                .map(|cpu| position(Cursor { phase: 0, start: start("web/3@a", "users", cpu, 4) }, log2))
                .collect();
            for pair in starts.windows(2) {
                assert_eq!(pair[1].wrapping_sub(pair[0]) & (length - 1), length / 4);
            }
        }
    }

    #[test]
    fn tasks_and_services_start_at_different_entries() {
        let mut starts: Vec<u32> =
            (0..100).map(|index| start(&format!("web/{index}@a"), "users", 0, 2)).collect();
        starts.extend((0..100).map(|service| start("web/0@a", &format!("s{service}"), 0, 2)));
        // The starts as entries of the shortest table, which has 1,024: 200 random draws hit about
        // 182 different entries.
        let mut entries: Vec<u32> = starts.iter().map(|start| start >> 22).collect();
        entries.sort_unstable();
        entries.dedup();
        assert!(entries.len() > 160, "{} different entries", entries.len());
    }
}

//! The incarnation: a number that increases with each start of the agent, even if the disk is lost
//! or the clock is set back.
//!
//! The incarnation is the last stored number plus one, or the Unix time in seconds, whichever is
//! larger. So the incarnation increases if only the disk is lost, and also if only the clock is set
//! back. If both happen together, clients still accept the agent's answers, and after the first
//! answer they also accept its pushes.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use lb_document::diagnostic::chain;
use lb_host::store::StateDirectory;
use tracing::warn;

/// The file in the state directory.
const FILE: &str = "incarnation";

/// Maximum size of the file, in bytes. A number of 32 bits and a line break take eleven bytes.
const MAX_BYTES: u64 = 64;

/// The maximum incarnation that is derived from the clock. Even if the clock is a century fast, a
/// million further starts are possible.
const LATEST: u32 = u32::MAX - 1_000_000;

/// Returns the incarnation of this start. `stored` is the last stored incarnation.
pub fn next(stored: Option<u32>, wall: SystemTime) -> u32 {
    let seconds = wall.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let seconds = u32::try_from(seconds).unwrap_or(u32::MAX).min(LATEST);
    // At the maximum, the number no longer increases. Clients still accept answers then, because
    // they accept answers of any incarnation.
    stored.map_or(seconds, |stored| stored.saturating_add(1).max(seconds))
}

/// Chooses the number of this start and stores it. If the directory cannot be used, the agent logs
/// the error and starts, because reports are more important.
pub fn draw(store: &StateDirectory, wall: SystemTime) -> u32 {
    let stored = match stored(store) {
        Ok(stored) => stored,
        Err(error) => {
            warn!(
                error = format!("{error:#}"),
                "cannot read the number of the last start; using the clock instead"
            );
            None
        }
    };
    let number = next(stored, wall);
    if let Err(error) = store.write(FILE, &[format!("{number}\n").as_bytes()]) {
        let error = chain(&error);
        warn!(
            error,
            "cannot save the number of this start; if the clock goes back before the next start, clients \
             ignore pushes after that start until they receive an answer"
        );
    }
    number
}

fn stored(store: &StateDirectory) -> Result<Option<u32>> {
    let Some(text) = store.read(FILE, MAX_BYTES)? else { return Ok(None) };
    let number = String::from_utf8_lossy(&text).trim().parse();
    number.map(Some).with_context(|| format!("{} does not contain a number", store.path(FILE).display()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn incarnations_rise_after_a_lost_disk_or_a_clock_that_went_back() {
        assert_eq!(next(None, at(1_800_000_000)), 1_800_000_000);
        assert_eq!(next(Some(1_700_000_000), at(1_800_000_000)), 1_800_000_000);
        assert_eq!(next(Some(1_900_000_000), at(1_800_000_000)), 1_900_000_001);
        assert_eq!(next(Some(1_800_000_000), at(1_800_000_000)), 1_800_000_001, "two starts in one second");
        assert_eq!(next(Some(7), UNIX_EPOCH - Duration::from_secs(1)), 8);
        assert_eq!(next(None, at(u64::from(u32::MAX) + 7)), LATEST);
        assert_eq!(next(Some(LATEST), at(u64::MAX >> 8)), LATEST + 1);
        assert_eq!(next(Some(u32::MAX), at(0)), u32::MAX);
    }

    #[test]
    fn incarnations_rise_from_start_to_start() {
        let folder = tempfile::tempdir().unwrap();
        let store = StateDirectory::at(folder.path().join("state"));
        assert_eq!(draw(&store, at(100)), 100);
        assert_eq!(draw(&store, at(50)), 101);
        fs::write(store.path(FILE), "12 monkeys").unwrap();
        assert_eq!(draw(&store, at(102)), 102);
        assert_eq!(fs::read_to_string(store.path(FILE)).unwrap(), "102\n");
    }

    #[test]
    fn an_unusable_directory_does_not_prevent_the_start() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(draw(&StateDirectory::at(file.join("state")), at(100)), 100);
    }
}

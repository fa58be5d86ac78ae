//! The faults to try, and their order. A run tries all faults, or a sample that fits into the time
//! limit. A seed determines the sample.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::str::FromStr;

use fastrand::Rng;

use crate::supervisor::{Phase, Record};

/// The errors to inject: out of descriptors, out of memory, and not permitted.
const ERRORS: [(i32, &str); 3] = [(libc::EMFILE, "EMFILE"), (libc::ENOMEM, "ENOMEM"), (libc::EPERM, "EPERM")];
const PHASES: [(Phase, &str); 3] = [(Phase::Start, "start"), (Phase::Run, "run"), (Phase::Stop, "stop")];

/// The calls of one kind in one phase.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Kind {
    pub phase: Phase,
    /// The name of the thread that makes the call.
    pub thread: String,
    /// The name of the system call; for bpf(2), the command.
    pub call: String,
}

/// A fault to inject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    pub kind: Kind,
    /// The number of calls of this kind that succeed before the fault.
    pub skip: u32,
    pub errno: i32,
}

impl fmt::Display for Case {
    /// Formats the case as the argument that reproduces it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind: Kind { phase, thread, call }, skip, errno } = self;
        let error = ERRORS.iter().find(|(number, _)| number == errno).map_or("?", |(_, name)| name);
        let phase = PHASES.iter().find(|(known, _)| known == phase).map_or("?", |(_, name)| name);
        write!(f, "{phase}/{thread}/{call}/{skip}/{error}")
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("write PHASE/THREAD/CALL/SKIP/ERROR, such as {EXAMPLE}");
        let [phase, thread, call, skip, error] = text.split('/').collect::<Vec<_>>()[..] else {
            return Err(wrong());
        };
        let (phase, _) = PHASES.into_iter().find(|(_, name)| *name == phase).ok_or_else(wrong)?;
        let (errno, _) = ERRORS.into_iter().find(|(_, name)| *name == error).ok_or_else(wrong)?;
        let skip = skip.parse().map_err(|_| wrong())?;
        Ok(Self { kind: Kind { phase, thread: thread.to_owned(), call: call.to_owned() }, skip, errno })
    }
}

const EXAMPLE: &str = "run/socklb/openat/3/EMFILE";

/// All cases for the recorded calls, in rounds: each round has one case of each kind that still has
/// any. The order within a kind depends only on the seed and the kind, not on the other kinds.
pub fn all(record: &Record, rounds: u32, seed: u64) -> Vec<Case> {
    let mut cases = BTreeMap::new();
    for (kind, count) in &record.seen {
        let mut hasher = DefaultHasher::new(); // has fixed keys
        (seed, kind).hash(&mut hasher);
        let mut random = Rng::with_seed(hasher.finish());
        let mut of_kind: Vec<_> = (0..count.div_ceil(rounds))
            .flat_map(|skip| ERRORS.map(|(errno, _)| Case { kind: kind.clone(), skip, errno }))
            .collect();
        // Rounds differ, so the last calls of a round may not come: the first half is tried first.
        let half = of_kind.len().div_ceil(2);
        random.shuffle(&mut of_kind[..half]);
        random.shuffle(&mut of_kind[half..]);
        for (place, case) in of_kind.into_iter().enumerate() {
            cases.insert((place, random.u64(..), kind), case);
        }
    }
    cases.into_values().collect()
}

//! The faults to try, and their order: each error at every call site, in each phase in which the
//! site was seen. A run tries all faults, or a sample that fits into the time limit. A seed
//! determines the sample.

use std::collections::BTreeMap;
use std::fmt;

use fastrand::Rng;

use crate::site::{Id, hash};
use crate::supervisor::{Desk, Fault, Phase};

/// The errors to inject: out of descriptors, out of memory, and not permitted.
pub const ERRORS: [(i32, &str); 3] =
    [(libc::EMFILE, "EMFILE"), (libc::ENOMEM, "ENOMEM"), (libc::EPERM, "EPERM")];

/// A fault to inject.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Case {
    pub phase: Phase,
    pub site: Id,
    pub errno: i32,
    /// The number of calls from the site that succeed before the fault.
    pub skip: u32,
}

impl Case {
    pub fn fault(&self) -> Fault {
        Fault { site: self.site, errno: self.errno, skip: self.skip }
    }
}

impl fmt::Display for Case {
    /// Formats the arguments that reproduce the case.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { phase, site, errno, skip } = self;
        let error = ERRORS.iter().find(|(number, _)| number == errno).map_or("?", |(_, name)| name);
        let phase = match phase {
            Phase::Start => "start",
            Phase::Run => "run",
            Phase::Stop => "stop",
        };
        write!(f, "--site {site} --errno {error} --phase {phase} --skip {skip}")
    }
}

/// All cases for the recorded call sites: each error at the first call of a site, and one error at
/// a later call. The order depends only on the seed and on the functions' names, not on the other
/// sites or on the position of a call in its function.
pub fn all(desk: &Desk, seed: u64) -> Vec<Case> {
    let seen = desk.look(|record| {
        let with_paths = record.seen.iter().map(|(key, count)| (*key, *count, record.sites[&key.1].path()));
        with_paths.collect::<Vec<_>>()
    });
    let (mut cases, mut alike) = (Vec::new(), BTreeMap::new());
    for ((phase, site), count, path) in seen {
        // Some functions make the same call in several places.
        let place = alike.entry((phase, path.clone())).or_insert(0_u32);
        *place += 1;
        let random = &mut Rng::with_seed(hash(&(seed, phase, path, *place)));
        let mut first = |errno, skip| (random.u64(..), Case { phase, site, errno, skip });
        cases.extend(ERRORS.map(|(errno, _)| first(errno, 0)));
        if count > 3 {
            let (errno, _) = random.choice(ERRORS).expect("`ERRORS` is not empty");
            // Skips at most half of the calls of one round: the record covers at least two rounds,
            // and rounds differ.
            let skip = 1 + random.u32(..(count / 4).max(1));
            cases.push((random.u64(..), Case { phase, site, errno, skip }));
        }
    }
    cases.sort_unstable();
    cases.into_iter().map(|(_, case)| case).collect()
}

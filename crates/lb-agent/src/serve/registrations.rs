//! Programs that run a backend and report its readiness: at most one for each backend, for as long
//! as the program renews its registration.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lb_report::agent::name::Name;

/// A program is treated as dead if it has not renewed its registration for this time. Programs
/// renew it three times within this time.
pub const LEASE: Duration = Duration::from_secs(5);

/// How long a registration remains after its program has died, so that its backend is still
/// reported. This time is long enough for every client to send a request.
const LINGER: Duration = Duration::from_mins(1);

/// Draws a number for a program's registration that cannot be guessed. The number has 53 bits,
/// because larger numbers in JSON are not exact.
///
/// # Errors
/// If the kernel provides no random numbers.
pub fn draw() -> anyhow::Result<u64> {
    let mut bytes = [0; 8];
    crate::keys::fill(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes) >> 11)
}

/// A process that has sent a request to the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registrant {
    pub user: u32,
    /// Process ID; 0 if the process is in another PID namespace.
    pub process: u32,
}

impl Registrant {
    /// This process.
    pub fn this() -> Self {
        Self { user: lb_host::trust::own_user(), process: std::process::id() }
    }
}

impl fmt::Display for Registrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of user {}", self.process, self.user)
    }
}

#[derive(Clone, Debug)]
enum RegistrationLife {
    /// The registration is valid until this process ends.
    Unlimited,
    /// The registration is valid until this time, unless the program renews it.
    Until(Instant),
    /// The program is dead. Its backend is reported until this time.
    Dead(Instant),
}

/// A program that runs a backend: the process, and the number that only the program knows.
#[derive(Clone, Copy, Debug)]
struct Program {
    number: u64,
    who: Registrant,
}

/// The statement with which a program claims a backend.
#[derive(Clone, Debug)]
pub struct Claim {
    /// A number that the program has drawn ([`draw`]), and that identifies the program from now on.
    pub number: u64,
    /// Whether the program has to renew its registration.
    pub is_leased: bool,
    /// The cgroup in which the program runs the backend, relative to the mount.
    pub cgroup: Option<PathBuf>,
}

/// The registration of a program that runs a backend.
#[derive(Clone, Debug)]
pub struct Registration {
    /// `None` if the program registered before this agent started, and has not registered again.
    program: Option<Program>,
    life: RegistrationLife,
    cgroup: Option<PathBuf>,
    /// The number of claims by other processes that were refused, and the last of these processes.
    pub refused: Option<(u64, Registrant)>,
}

impl Registration {
    /// Whether the program is alive, according to its registration.
    pub const fn is_alive(&self) -> bool {
        !matches!(self.life, RegistrationLife::Dead(_))
    }

    /// The process; `None` if it registered before this agent started, and has not registered
    /// again.
    pub fn who(&self) -> Option<Registrant> {
        self.program.map(|program| program.who)
    }

    fn is_of(&self, number: u64) -> bool {
        self.program.is_some_and(|program| program.number == number)
    }
}

/// The end of a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistrationEnd {
    /// The program is dead.
    Died(Name),
    /// The program is dead, and its backend need not be reported any more.
    Gone(Name),
}

/// The reason why a program cannot register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claimed {
    /// This process already runs the backend.
    Backend(Registrant),
    /// The number belongs to the program that runs this other backend.
    Number(Name),
    /// Without a key, only programs of this user and of root may claim the backend.
    User(u32),
}

#[derive(Debug, Default)]
pub struct Registrations {
    by_name: BTreeMap<Name, Registration>,
    /// For each backend, the user of the first program that claimed it without a key. The map has
    /// at most one entry for each configured backend.
    first_users: BTreeMap<Name, u32>,
}

impl Registrations {
    /// Registers a program for a backend, with a number that the program has drawn and that no
    /// other program knows. The program may claim the backend again with the same number, because
    /// it may not have received the first answer.
    ///
    /// `has_key`: whether the program has a key of the backend.
    ///
    /// # Errors
    /// The process that already has the backend, the backend that has the number, or the only user
    /// that may claim the backend without a key.
    pub fn register(
        &mut self,
        name: Name,
        claim: Claim,
        has_key: bool,
        who: Registrant,
        now: Instant,
    ) -> Result<(), Claimed> {
        let Claim { number, is_leased, cgroup } = claim;
        let first_user = self.first_users.get(&name).copied();
        if let Some(user) = first_user.filter(|user| !has_key && *user != who.user && who.user != 0) {
            return Err(Claimed::User(user));
        }
        if let Some((other, _)) =
            self.by_name.iter().find(|(other, one)| **other != name && one.is_of(number))
        {
            return Err(Claimed::Number(*other));
        }
        let mut refused = None;
        if let Some(first) = self.by_name.get_mut(&name).filter(|first| first.is_alive())
            && let Some(program) = first.program
        {
            if program.number != number {
                first.refused = Some((first.refused.map_or(1, |(times, _)| times + 1), who));
                return Err(Claimed::Backend(program.who));
            }
            refused = first.refused;
        }
        if !has_key {
            self.first_users.entry(name).or_insert(who.user);
        }
        let life = if is_leased { RegistrationLife::Until(now + LEASE) } else { RegistrationLife::Unlimited };
        let program = Some(Program { number, who });
        self.by_name.insert(name, Registration { program, life, cgroup, refused });
        Ok(())
    }

    /// Records that a program had registered for the backend before this agent started. The program
    /// is treated as dead until it registers again.
    pub fn remember(&mut self, name: Name, now: Instant) {
        let life = RegistrationLife::Dead(now + LINGER);
        self.by_name.entry(name).or_insert(Registration { program: None, life, cgroup: None, refused: None });
    }

    /// Renews the registration of a program. Returns its backend; `None` if no living program has
    /// this number.
    pub fn refresh(&mut self, number: u64, now: Instant) -> Option<Name> {
        let (name, registration) =
            self.by_name.iter_mut().find(|(_, one)| one.is_of(number) && one.is_alive())?;
        if let RegistrationLife::Until(until) = &mut registration.life {
            *until = now + LEASE;
        }
        Some(*name)
    }

    /// Removes the registration with this number. Returns the backend; `None` if there is no such
    /// registration.
    pub fn unregister(&mut self, number: u64) -> Option<Name> {
        let name = *self.by_name.iter().find(|(_, one)| one.is_of(number))?.0;
        self.by_name.remove(&name);
        Some(name)
    }

    /// The registration of a backend's program.
    pub fn get(&self, name: Name) -> Option<&Registration> {
        self.by_name.get(&name)
    }

    /// The cgroups of the programs that are alive.
    pub fn cgroups(&self) -> impl Iterator<Item = (Name, &Path)> {
        let alive = self.by_name.iter().filter(|(_, registration)| registration.is_alive());
        alive.filter_map(|(name, registration)| Some((*name, registration.cgroup.as_deref()?)))
    }

    /// Ends the registrations that are overdue at `now`, and returns a [`RegistrationEnd`] for
    /// each.
    pub fn expire(&mut self, now: Instant) -> Vec<RegistrationEnd> {
        let mut ends = Vec::new();
        self.by_name.retain(|name, registration| match registration.life {
            RegistrationLife::Until(until) if until <= now => {
                registration.life = RegistrationLife::Dead(now + LINGER);
                ends.push(RegistrationEnd::Died(*name));
                true
            }
            RegistrationLife::Dead(until) if until <= now => {
                ends.push(RegistrationEnd::Gone(*name));
                false
            }
            RegistrationLife::Until(_) | RegistrationLife::Dead(_) | RegistrationLife::Unlimited => true,
        });
        ends
    }

    /// The next time at which [`Registrations::expire`] ends a registration.
    pub fn next_at(&self) -> Option<Instant> {
        let times = self.by_name.values().filter_map(|registration| match registration.life {
            RegistrationLife::Until(at) | RegistrationLife::Dead(at) => Some(at),
            RegistrationLife::Unlimited => None,
        });
        times.min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who(process: u32) -> Registrant {
        Registrant { user: 0, process }
    }

    fn claim(number: u64, is_leased: bool) -> Claim {
        Claim { number, is_leased, cgroup: Some(number.to_string().into()) }
    }

    #[test]
    fn without_a_key_only_the_user_of_the_first_program_and_root_may_claim_a_backend() {
        let now = Instant::now();
        let name = crate::name::parse("10.0.0.1:80").unwrap();
        let mut all = Registrations::default();
        let mut register = |number, user, has_key| {
            let who = Registrant { user, process: 1 };
            let registered = all.register(name, claim(number, true), has_key, who, now);
            all.unregister(number);
            registered
        };
        assert_eq!(
            register(1, 1_001, true),
            Ok(()),
            "a program with the key does not reserve the backend for its user"
        );
        assert_eq!(register(2, 1_000, false), Ok(()));
        assert_eq!(register(3, 1_001, false), Err(Claimed::User(1_000)));
        assert_eq!(register(4, 1_001, true), Ok(()));
        assert_eq!((register(5, 0, false), register(6, 1_000, false)), (Ok(()), Ok(())));
        assert_eq!(register(7, 1_001, false), Err(Claimed::User(1_000)));
    }

    #[test]
    fn a_second_program_is_refused_while_the_first_lives() {
        let now = Instant::now();
        let name = crate::name::parse("10.0.0.1:80").unwrap();
        let mut all = Registrations::default();
        assert_eq!(all.register(name, claim(1, true), true, who(1), now), Ok(()));
        assert_eq!(all.register(name, claim(2, true), true, who(2), now), Err(Claimed::Backend(who(1))));
        assert_eq!(all.register(name, claim(3, true), true, who(3), now), Err(Claimed::Backend(who(1))));
        assert_eq!(all.get(name).unwrap().refused, Some((2, who(3))));
        assert_eq!((all.refresh(2, now), all.refresh(1, now)), (None, Some(name)));
        assert_eq!(all.cgroups().collect::<Vec<_>>(), [(name, Path::new("1"))]);
        assert_eq!(all.unregister(1), Some(name));
        assert_eq!(all.register(name, claim(2, true), true, who(2), now), Ok(()));
    }

    #[test]
    fn an_expired_program_is_dead_and_its_backend_is_reported_for_a_minute() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let name = crate::name::parse("10.0.0.1:80").unwrap();
        let mut all = Registrations::default();
        all.register(name, claim(1, true), true, who(1), start).unwrap();
        assert_eq!(all.refresh(1, at(4)), Some(name));
        assert_eq!((all.next_at(), all.expire(at(8))), (Some(at(9)), vec![]));
        assert_eq!(all.expire(at(9)), [RegistrationEnd::Died(name)]);
        assert_eq!(all.refresh(1, at(9)), None, "the program has to register again");
        assert_eq!((all.expire(at(68)), all.expire(at(69))), (vec![], vec![RegistrationEnd::Gone(name)]));
        assert_eq!((all.by_name.len(), all.next_at()), (0, None));
        all.register(name, claim(1, true), true, who(1), start).unwrap();
        all.expire(at(5));
        assert_eq!(
            all.register(name, claim(2, true), true, who(2), at(6)),
            Ok(()),
            "the backend of a dead program is free"
        );
    }

    #[test]
    fn a_program_may_register_again_with_its_number() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let [name, other] = ["10.0.0.1:80", "10.0.0.1:81"].map(|name| crate::name::parse(name).unwrap());
        let mut all = Registrations::default();
        all.register(name, claim(1, true), true, who(1), start).unwrap();
        all.register(name, claim(2, true), true, who(2), start).unwrap_err();
        assert_eq!(all.register(name, claim(1, true), true, who(1), at(4)), Ok(()));
        assert_eq!((all.next_at(), all.get(name).unwrap().refused), (Some(at(9)), Some((1, who(2)))));
        // A registration number identifies one backend.
        assert_eq!(all.register(other, claim(1, true), true, who(1), at(4)), Err(Claimed::Number(name)));
    }

    #[test]
    fn a_program_of_an_earlier_agent_is_dead_until_it_registers() {
        let start = Instant::now();
        let name = crate::name::parse("10.0.0.1:80").unwrap();
        let mut all = Registrations::default();
        all.remember(name, start);
        assert!(!all.get(name).unwrap().is_alive());
        assert_eq!((all.refresh(0, start), all.unregister(0)), (None, None));
        assert_eq!(all.register(name, claim(1, true), true, who(1), start), Ok(()));
        assert_eq!(all.get(name).unwrap().who(), Some(who(1)));
        // A program that has registered is not replaced.
        all.remember(name, start);
        assert!(all.get(name).unwrap().is_alive());
        let mut all = Registrations::default();
        all.remember(name, start);
        assert_eq!((all.expire(start + LINGER), all.next_at()), (vec![RegistrationEnd::Gone(name)], None));
    }

    #[test]
    fn a_program_in_the_agents_process_needs_no_lease() {
        let now = Instant::now();
        let mut all = Registrations::default();
        all.register(crate::name::parse("10.0.0.1:80").unwrap(), claim(1, false), true, who(1), now).unwrap();
        assert_eq!((all.next_at(), all.expire(now + Duration::from_hours(9))), (None, vec![]));
    }
}

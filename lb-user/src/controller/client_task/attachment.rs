//! Where a client task is attached: at the cgroup that its path names now, and at earlier ones
//! until their flows have ended.
//!
//! A cgroup may be created again at the same path, and a client may be configured for another one.
//! The programs attach to the new cgroup first; old links go once no flow is open that may have
//! begun at them. It reads no clock.

use std::path::Path;
use std::time::{Duration, Instant};

use lb_kernel::{Cgroup, ClientKernel, DatapathError};

use super::ClientTask;

/// Links to a cgroup that still exists are checked at this interval. Only an operator removes them,
/// and each check takes three system calls.
const LINKS: Duration = Duration::from_secs(10);

/// What became of a client's attachment when its cgroup was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Followed {
    /// The programs are where they were.
    Unchanged,
    /// The programs were attached, to another cgroup or again.
    Attached,
    /// The cgroup is gone.
    Lost,
    /// An operator has removed the client's pins.
    Unpinned,
}

impl ClientTask {
    fn kernel(&self) -> &dyn ClientKernel {
        self.datapath.kernel()
    }

    /// Replaces the attached programs with this build's, or attaches these: from now on the
    /// cgroup's connects are balanced. Without a cgroup there is nothing to attach to yet. On other
    /// cgroups the programs stay until [`ClientTask::leave_other_cgroups`].
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn attach(&mut self) -> Result<Followed, DatapathError> {
        let result = match self.kernel().cgroup(&self.path) {
            Ok(now) => self.kernel().attach(&now).map(|()| {
                self.cgroup = Some(now);
                self.has_moved = true;
                Followed::Attached
            }),
            Err(DatapathError::NoCgroup(_)) => {
                Ok(if self.cgroup.take().is_some() { Followed::Lost } else { Followed::Unchanged })
            }
            Err(error) => Err(error),
        };
        self.attach_error = result.as_ref().err().map(|error| crate::error::chain(error));
        result
    }

    /// Attaches again if the programs are not attached to the cgroup that the configured path names
    /// now: a restarted service has a new cgroup at its old path, links can be removed by hand, and
    /// an attachment may have been interrupted. After a failure nothing is done until a retry is
    /// due.
    ///
    /// # Errors
    /// If the kernel refuses, or the attachment cannot be read; then everything stays as it was.
    /// The `bool` is `true` if the error differs from the one before.
    pub fn follow_cgroup(&mut self, now: Instant) -> Result<Followed, (DatapathError, bool)> {
        if self.is_unpinned || self.first_look.is_some() || !self.attaching.is_due(now) {
            return Ok(Followed::Unchanged);
        }
        match self.attach_if_needed(now) {
            Ok(followed) => {
                self.attaching.succeeded();
                Ok(followed)
            }
            Err(error) => {
                let is_new = self.attaching.failed(now, &crate::error::chain(&error));
                Err((error, is_new))
            }
        }
    }

    fn attach_if_needed(&mut self, now: Instant) -> Result<Followed, DatapathError> {
        if let Some((seen, at)) = self.links_seen
            && self.kernel().is_cgroup(&self.path, seen)
            && now.saturating_duration_since(at) < LINKS
        {
            return Ok(Followed::Unchanged);
        }
        let there = self.cgroup_there()?;
        // Links of an earlier daemon also receive the programs of this one.
        self.links_seen = None;
        if let Some(there) = there
            && self.kernel().is_fully_attached(there.id)?
        {
            self.attach_error = None;
            if self.cgroup.is_some() {
                self.links_seen = Some((there.id, now));
                return Ok(Followed::Unchanged);
            }
        }
        if self.look_for_pins()? { self.attach() } else { Ok(Followed::Unpinned) }
    }

    /// Something has changed at the client's cgroup: the next check of it need not wait for its
    /// pause.
    pub fn cgroup_changed(&mut self) {
        self.links_seen = None;
        self.attaching.retry_now();
    }

    /// Checks whether the client's pins are still those that this client task works on. If the
    /// whole directory was removed, an operator wants the client gone: it stays gone until another
    /// client task is opened for it.
    ///
    /// # Errors
    /// If that cannot be determined.
    pub fn look_for_pins(&mut self) -> Result<bool, DatapathError> {
        if !self.is_unpinned && !self.kernel().is_pinned()? {
            self.is_unpinned = true;
            self.cgroup = None;
            self.attach_error = None;
        }
        Ok(!self.is_unpinned)
    }

    /// Whether an operator has removed the client's pins.
    pub fn is_unpinned(&self) -> bool {
        self.is_unpinned
    }

    /// Leaves cgroups that are no longer the client's: stops flows from beginning there, and
    /// detaches once no flow is open that may have begun there. Call this only once the client that
    /// takes over a cgroup is attached there. After a failure nothing is done until a retry is due.
    ///
    /// # Errors
    /// If a link cannot be read or removed. The `bool` is `true` if the error differs from the one
    /// before.
    pub fn leave_other_cgroups(&mut self, now: Instant) -> Result<(), (DatapathError, bool)> {
        if !self.leaving.is_due(now) || !self.has_moved && !self.has_old_links {
            return Ok(());
        }
        let result = if self.has_moved { self.retire_other_links() } else { Ok(()) };
        match result.and_then(|()| self.remove_other_links()) {
            Ok(()) => {
                self.has_moved = false;
                self.leaving.succeeded();
                Ok(())
            }
            Err(error) => {
                let is_new = self.leaving.failed(now, &crate::error::chain(&error));
                Err((error, is_new))
            }
        }
    }

    /// Whether flows may still begin in cgroups that the client has left.
    pub fn has_moved(&self) -> bool {
        self.has_moved
    }

    /// Ids of cgroups other than the client's in which its flows still begin.
    ///
    /// # Errors
    /// If the links cannot be read.
    pub fn begins_elsewhere(&self) -> Result<Vec<u64>, DatapathError> {
        let mut cgroups = self.kernel().begins_at()?;
        cgroups.retain(|cgroup| self.cgroup.as_ref().is_none_or(|ours| ours.id != *cgroup));
        Ok(cgroups)
    }

    /// While there is no cgroup at the client's path, links to a cgroup that was removed there
    /// stay, because sockets that were made in it may still dial. A cgroup at another path is no
    /// longer the client's, and its links go.
    fn retire_other_links(&self) -> Result<(), DatapathError> {
        match &self.cgroup {
            Some(cgroup) => self.kernel().leave_other_cgroups(cgroup.id),
            None => self.kernel().leave_cgroups_elsewhere(&self.path),
        }
    }

    fn remove_other_links(&mut self) -> Result<(), DatapathError> {
        let Some(cgroup) = &self.cgroup else { return Ok(()) };
        // Only this daemon makes links, so no old link can appear until the client moves.
        self.has_old_links = self.kernel().has_old_links(cgroup.id)?;
        if !self.has_old_links || self.open_flows() > 0 {
            return Ok(());
        }
        self.kernel().remove_old_links(cgroup.id)
    }

    /// Whether the programs of this client task are attached to the cgroup that the configured path
    /// names now.
    ///
    /// # Errors
    /// If that cannot be determined, in which case the programs may or may not be attached.
    pub fn is_effective(&self) -> Result<bool, DatapathError> {
        match self.cgroup_there()? {
            Some(there) => self.kernel().is_fully_attached(there.id),
            None => Ok(false),
        }
    }

    /// The cgroup that the configured path names now, if there is one.
    fn cgroup_there(&self) -> Result<Option<Cgroup>, DatapathError> {
        match self.kernel().cgroup(&self.path) {
            Ok(now) => Ok(Some(now)),
            Err(DatapathError::NoCgroup(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the client's connects are balanced in the cgroup with this id.
    ///
    /// # Errors
    /// If that cannot be determined.
    pub fn covers(&self, cgroup: u64) -> Result<bool, DatapathError> {
        self.kernel().is_balanced(cgroup)
    }

    /// Whether there is a cgroup at its path; `false` as well if that cannot be determined.
    pub fn has_cgroup(&self) -> bool {
        self.cgroup_there().is_ok_and(|there| there.is_some())
    }

    /// Full path of its cgroup, whether or not it exists.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Why the programs are not attached, if the kernel refused.
    pub fn attach_error(&self) -> Option<&str> {
        self.attach_error.as_deref()
    }

    /// The cgroup that the programs were attached to at the last check.
    pub fn cgroup(&self) -> Option<&Cgroup> {
        self.cgroup.as_ref()
    }
}

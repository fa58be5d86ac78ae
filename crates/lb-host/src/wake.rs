//! How the event loop wakes a thread of its own that waits for something else as well: an eventfd (eventfd(2)).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

/// Both ends of it.
#[derive(Clone)]
pub struct Wake(Arc<OwnedFd>);

impl Wake {
    /// One that nobody has woken.
    ///
    /// # Errors
    /// If no descriptor is left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Makes it readable.
    pub fn wake(&self) {
        // It is full only if the thread was woken and has not looked yet.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Makes it unreadable, until it is woken anew.
    pub fn woken(&self) {
        // Empty, unless it was woken.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

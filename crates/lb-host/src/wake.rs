//! Wakes a thread that waits for several kinds of events. The event loop uses an eventfd
//! (eventfd(2)) for this.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

/// The eventfd, which the event loop writes and the thread reads.
#[derive(Clone)]
pub struct Wake(Arc<OwnedFd>);

impl Wake {
    /// Creates an eventfd that is not readable yet.
    ///
    /// # Errors
    /// If no descriptor is free.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Makes the eventfd readable.
    pub fn wake(&self) {
        // The write fails only if the counter is full, because the thread has not read it yet.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Makes the eventfd unreadable until the next `wake`.
    pub fn woken(&self) {
        // If the thread was not woken, there is nothing to read.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

//! A thread that works beside the measurement.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// A running thread. On drop, the thread is requested to end, and has ended afterwards.
pub struct Beside {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Beside {
    /// Starts a thread that ends soon after its argument was set.
    pub fn start(work: impl FnOnce(&AtomicBool) + Send + 'static) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&ends);
        Self { ends, thread: Some(std::thread::spawn(move || work(&until))) }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

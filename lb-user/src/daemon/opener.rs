//! Opens clients: locks their pins, adopts or creates their maps, and loads their programs. Loading
//! takes tens of milliseconds per client. All clients share one wait for readers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;

use crate::config::ClientConfig;
use crate::controller::{ClientOpener, ClientTask, OpenRequest, Opened, Tried};

/// Opens the clients that do not run, and computes the assignments of the lists in force. May block
/// as long as [`ClientOpener::open_all`], plus seconds to compute the assignments of jobs with many
/// tasks and endpoints.
pub fn open(mut request: OpenRequest) -> Tried {
    let by_service = request.assignments();
    let opened = request.opener.open_all(&request.absent());
    Tried { clients: request.clients, opened, by_service }
}

impl ClientOpener {
    /// Opens clients on several threads at the same time, because the kernel's verifier takes
    /// nearly all of the time. May block for tens of milliseconds per client.
    fn open_all(&self, clients: &[ClientConfig]) -> Vec<Opened> {
        let open =
            |client: &ClientConfig| Opened { result: self.open(client.clone()), client: client.clone() };
        let mut opened = on_threads(self.environment.threads, Builder::new, clients, open);
        let mut adopted: Vec<&mut ClientTask> = opened.iter_mut().filter_map(Opened::adopted).collect();
        if adopted.is_empty() {
            return opened;
        }
        adopted.iter_mut().for_each(|client_task| client_task.before_wait());
        let waited = self.environment.kernel.wait_for_readers();
        let waited = waited.map_err(|error| crate::error::chain(&error));
        opened.into_iter().map(|opened| opened.after_wait(&waited, self.now)).collect()
    }
}

/// Calls `of` for each item, on at most `threads` threads including this one. If the kernel refuses
/// to start a thread, for example at a limit of tasks, the existing threads do all the work. The
/// results are in the order of the items.
fn on_threads<T: Sync, R: Send>(
    threads: usize,
    builder: fn() -> Builder,
    things: &[T],
    of: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let work = || {
        let numbers = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
        let theirs = numbers.map_while(|number| Some((number, of(things.get(number)?))));
        theirs.collect::<Vec<(usize, R)>>()
    };
    let mut results = std::thread::scope(|scope| {
        let others = 1..threads.min(things.len());
        let others: Vec<_> = others.map_while(|_| builder().spawn_scoped(scope, work).ok()).collect();
        let mut results = work();
        results.extend(others.into_iter().flat_map(|thread| thread.join().expect("a thread does not panic")));
        results
    });
    results.sort_by_key(|(number, _)| *number);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_things_even_if_no_thread_can_be_started() {
        // No kernel has memory for a stack of this size.
        let refused = || Builder::new().stack_size(1 << 60);
        assert!(refused().spawn(|| ()).is_err());
        for count in [0, 1, 2, 63, 64] {
            let things: Vec<u32> = (0..count).collect();
            let doubled: Vec<u32> = things.iter().map(|thing| thing * 2).collect();
            for builder in [Builder::new, refused] {
                assert_eq!(on_threads(3, builder, &things, |thing| thing * 2), doubled);
            }
        }
    }
}

//! Opens clients: locks their pins, adopts or creates their maps, and loads their programs. Loading
//! takes tens of milliseconds per client. All clients share one wait for readers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;

use anyhow::{Result, anyhow, ensure};
use lb_kernel::{DatapathError, Pins};

use crate::assignments;
use crate::config::ClientConfig;
use crate::controller::{
    ClientOpener, ClientTask, ClientTaskError, Leaving, ListInForce, OpenRequest, Opened, Tried,
    lock_other_versions,
};

/// Opens the clients that do not run, and computes the assignments of the lists in force. May block
/// as long as [`ClientOpener::open_all`], plus seconds to compute the assignments of jobs with many
/// tasks and endpoints.
pub fn open(request: OpenRequest) -> Tried {
    let OpenRequest { clients, there, statics, in_force, opener } = request;
    let mut by_service = assignments::statics(&clients, &statics);
    for (service, ListInForce { mut assignments, .. }) in in_force {
        assignments.complete(&assignments::consumers(&clients, &service));
        by_service.entry(service).or_insert(assignments);
    }
    let absent = clients.iter().filter(|client| !there.contains(&client.name));
    let opened = opener.open_all(absent.cloned());
    Tried { clients, opened, by_service }
}

impl ClientOpener {
    /// Opens a client, and locks the pins that other versions of socklb have created for it.
    fn open(&self, client: ClientConfig) -> Result<(ClientTask, Vec<Leaving>)> {
        let kernel = &*self.environment.kernel;
        // While the daemon is stopping, no further client may be opened, because a successor waits
        // for the locks.
        ensure!(!self.environment.stopping.load(Ordering::Relaxed), "the daemon is stopping");
        // The pins of other versions are locked before any change, because a socklb of another
        // version may be running.
        let others = lock_other_versions(kernel, &self.pins, &client.name, &self.leaving)?;
        match self.open_here(client) {
            Ok(client_task) => Ok((client_task, others)),
            // This error is not wrapped in `ClientTaskError`, because the code that selects the
            // remedy searches the chain of causes for a [`DatapathError`].
            Err(ClientTaskError::Datapath(error)) => Err(error.into()),
            Err(error) => Err(error.into()),
        }
    }

    fn open_here(&self, client: ClientConfig) -> Result<ClientTask, ClientTaskError> {
        let kernel = &*self.environment.kernel;
        let path = kernel.mount()?.join(&client.cgroup);
        // A path that can never be a cgroup is an error now. If the path does not exist yet, the
        // client waits until the cgroup is created.
        match kernel.cgroup(&path) {
            Ok(_) | Err(DatapathError::NoCgroup(_)) => {}
            Err(error) => return Err(error.into()),
        }
        let pins = Pins::of(&self.pins, &client.name);
        let kernel = kernel.client(pins.clone())?;
        ClientTask::open(client, pins, kernel, self.limits, &self.environment, self.now)
    }

    /// Opens clients on several threads at the same time, because the kernel's verifier takes
    /// nearly all of the time. May block for tens of milliseconds per client.
    pub fn open_all(&self, clients: impl IntoIterator<Item = ClientConfig>) -> Vec<Opened> {
        let clients: Vec<ClientConfig> = clients.into_iter().collect();
        let open =
            |client: &ClientConfig| Opened { result: self.open(client.clone()), client: client.clone() };
        let mut opened = on_threads(self.environment.threads, Builder::new, &clients, open);
        let mut adopted = Vec::new();
        for Opened { client, result } in &mut opened {
            if let Ok((client_task, _)) = result
                && !client_task.datapath().applied().services.is_empty()
            {
                client_task.before_wait();
                adopted.push(client.name.clone());
            }
        }
        if adopted.is_empty() {
            return opened;
        }
        // An earlier daemon may have been killed just after it replaced tables. Its old tables must
        // not be overwritten while a program reads them.
        let waited = self.environment.kernel.wait_for_readers().map_err(|error| crate::error::chain(&error));
        for Opened { client, result } in &mut opened {
            let (true, Ok((client_task, _))) = (adopted.contains(&client.name), &mut *result) else {
                continue;
            };
            match &waited {
                Ok(()) => {
                    client_task.after_wait();
                    // Slots are freed before lists are delivered, because lists may need the slots
                    // of backends that no longer have flows.
                    client_task.free_idle(self.now);
                }
                Err(error) => *result = Err(anyhow!(error.clone())),
            }
        }
        opened
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

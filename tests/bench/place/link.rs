//! A link to other hosts, with a delay and an optional loss. It consists of two TAP devices, one of
//! them in its own network namespace, and of threads that carry frames from one to the other some
//! milliseconds later. Loopback is not suitable: there, an answer arrives while the packet is being
//! sent, so even with fifty connects at a time, only as many are under way as there are CPUs. The
//! link does not use netem, because some kernels do not have it, and because the losses of this
//! link are the same in each run.
//!
//! Every address of `10.78.0.0/16` belongs to the far end.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use stage::namespace::{another_network, run};

use super::process::place_in;
use super::thread::Beside;
use crate::pause;

/// How long a carrier thread waits before it checks whether it must end.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// The size of the buffer for a frame. It is longer than any frame, because the devices have an MTU
/// of 1,500.
const FRAME: usize = 2048;

/// The address of the near end.
pub const NEAR: &str = "10.77.0.1";

/// The link. It is removed on drop, together with the far namespace.
pub struct Link {
    far: File,
    carried: Arc<Carried>,
    _carriers: Vec<Beside>,
}

/// The state that the carrier threads share.
struct Carried {
    delay: Duration,
    /// The number of packets per million that are lost.
    lost: AtomicU64,
}

impl Link {
    /// Connects the network of the calling thread with a new network, where `listen` starts the
    /// listeners. A packet takes `delay` in one direction.
    pub fn start<T: Send>(delay: Duration, listen: impl FnOnce() -> Result<T> + Send) -> Result<(Self, T)> {
        // The hardware address of the peer is fixed at both ends, because an address request might
        // be lost.
        let near = tap("near")?;
        run("ip link set near address 02:00:00:00:00:01 up");
        run("ip address add 10.77.0.1/24 dev near");
        run("ip neigh add 10.77.0.2 lladdr 02:00:00:00:00:02 dev near nud permanent");
        run("ip route add 10.78.0.0/16 via 10.77.0.2");
        let mut started = None;
        let far_namespace = another_network(|| {
            started = Some((|| {
                let far = tap("far")?;
                run("ip link set far address 02:00:00:00:00:02 up");
                run("ip address add 10.77.0.2/24 dev far");
                run("ip neigh add 10.77.0.1 lladdr 02:00:00:00:00:01 dev far nud permanent");
                run("ip route add local 10.78.0.0/16 dev lo");
                anyhow::Ok((far, listen()?))
            })());
        });
        let (far, listening) = started.context("the thread has no result")??;
        let carried = Arc::new(Carried { delay, lost: AtomicU64::new(0) });
        let mut carriers = Vec::new();
        for (seed, from, to) in [(1, &near, &far), (2, &far, &near)] {
            let (from, to, carried) = (from.try_clone()?, to.try_clone()?, Arc::clone(&carried));
            let (sent, under_way) = channel();
            carriers.push(Beside::start(move |ends| take(from, &sent, &carried, seed, ends)));
            carriers.push(Beside::start(move |_| bring(to, &under_way)));
        }
        Ok((Self { far: far_namespace, carried, _carriers: carriers }, listening))
    }

    /// Makes the link lose this share of the packets from now on, in each direction.
    pub fn lose(&self, share: f64) {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most one million")]
        self.carried.lost.store((share * 1e6) as u64, Ordering::Relaxed);
    }

    /// Makes a command run at the far end.
    pub fn at_the_far_end(&self, command: &mut Command) {
        place_in(&self.far, command);
    }
}

/// Receives frames until the link ends.
fn take(mut from: File, sent: &Sender<(Instant, Vec<u8>)>, carried: &Carried, seed: u64, ends: &AtomicBool) {
    let mut random = fastrand::Rng::with_seed(seed);
    while !ends.load(Ordering::Relaxed) {
        let mut ready = [PollFd::new(&from, PollFlags::IN)];
        if poll(&mut ready, Some(&LOOK)).unwrap_or(0) == 0 {
            continue;
        }
        let mut frame = vec![0; FRAME];
        let Ok(bytes) = from.read(&mut frame) else { continue };
        frame.truncate(bytes);
        if random.u64(..1_000_000) < carried.lost.load(Ordering::Relaxed) {
            continue;
        }
        if sent.send((Instant::now() + carried.delay, frame)).is_err() {
            return;
        }
    }
}

/// Delivers each frame when it is due, until all senders are dropped.
fn bring(mut to: File, under_way: &Receiver<(Instant, Vec<u8>)>) {
    // If this fails, each frame is up to 50 us late, which is acceptable.
    let _ = pause::without_slack();
    for (due, frame) in under_way {
        pause::until(due);
        // If the queue of the device is full, the frame is lost, as on any link.
        let _ = to.write(&frame);
    }
}

/// Creates a TAP device with this name in the network of the calling thread. The device disappears
/// when its last handle is closed.
fn tap(name: &str) -> Result<File> {
    let file = File::options().read(true).write(true).open("/dev/net/tun").context("open /dev/net/tun")?;
    // SAFETY: the structure contains only numbers, for which zero is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::try_from(from)?;
    }
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(libc::IFF_TAP | libc::IFF_NO_PI)?;
    // SAFETY: the request is the kernel's own structure and lives through the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    ensure!(result == 0, "make the device {name}: {}", std::io::Error::last_os_error());
    Ok(file)
}

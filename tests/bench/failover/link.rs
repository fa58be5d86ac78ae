//! A way to other hosts that takes its time: two tunnel devices, one of them in a network namespace of its own, and packets
//! that are carried from one to the other some milliseconds later. On loopback an answer comes while the packet is being sent,
//! so that fifty connects at a time would be no more than there are CPUs.
//!
//! Every address of `10.78.0.0/16` is the other end's.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use stage::namespace::another_network;

/// How long a packet takes, one way.
pub const DELAY: Duration = Duration::from_millis(2);

/// How long a carrier waits before it looks whether it is to end.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Longer than any packet: the devices have an MTU of 1,500.
const PACKET: usize = 2048;

/// The way. Gone when it is dropped, with the far namespace.
pub struct Link {
    _far: File,
    ends: Arc<AtomicBool>,
    carriers: Vec<JoinHandle<()>>,
}

impl Link {
    /// Connects the calling thread's network with one of its own, in which `listen` starts those who listen.
    pub fn start<T: Send>(listen: impl FnOnce() -> Result<T> + Send) -> Result<(Self, T)> {
        let near = tunnel("near")?;
        run("ip address add 10.77.0.1/24 dev near")?;
        run("ip link set near up")?;
        run("ip route add 10.78.0.0/16 dev near")?;
        let mut started = None;
        let far_namespace = another_network(|| {
            started = Some((|| {
                let far = tunnel("far")?;
                run("ip address add 10.77.0.2/24 dev far")?;
                run("ip link set far up")?;
                run("ip route add local 10.78.0.0/16 dev lo")?;
                anyhow::Ok((far, listen()?))
            })());
        });
        let (far, listening) = started.context("it was run")??;
        let ends = Arc::new(AtomicBool::new(false));
        let mut carriers = Vec::new();
        for (from, to) in [(&near, &far), (&far, &near)] {
            let (from, to, ends) = (from.try_clone()?, to.try_clone()?, Arc::clone(&ends));
            let (sent, under_way) = channel();
            carriers.push(std::thread::spawn(move || take(from, &sent, &ends)));
            carriers.push(std::thread::spawn(move || bring(to, &under_way)));
        }
        Ok((Self { _far: far_namespace, ends, carriers }, listening))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        for carrier in self.carriers.drain(..) {
            let _ = carrier.join();
        }
    }
}

/// Takes what is sent, until the link ends.
fn take(mut from: File, sent: &Sender<(Instant, Vec<u8>)>, ends: &AtomicBool) {
    while !ends.load(Ordering::Relaxed) {
        let mut ready = [PollFd::new(&from, PollFlags::IN)];
        if poll(&mut ready, Some(&LOOK)).unwrap_or(0) == 0 {
            continue;
        }
        let mut packet = vec![0; PACKET];
        let Ok(bytes) = from.read(&mut packet) else { continue };
        packet.truncate(bytes);
        if sent.send((Instant::now() + DELAY, packet)).is_err() {
            return;
        }
    }
}

/// Brings it when its time has come, until nobody sends any more.
fn bring(mut to: File, under_way: &Receiver<(Instant, Vec<u8>)>) {
    for (due, packet) in under_way {
        while let Some(left) = due.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            std::thread::park_timeout(left);
        }
        // A device whose queue is full loses the packet, as any link does.
        let _ = to.write(&packet);
    }
}

/// Makes a tunnel device of this name in the calling thread's network; it is gone when the last handle is.
fn tunnel(name: &str) -> Result<File> {
    let file = File::options().read(true).write(true).open("/dev/net/tun").context("open /dev/net/tun")?;
    // SAFETY: a structure of plain numbers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::try_from(from)?;
    }
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(libc::IFF_TUN | libc::IFF_NO_PI)?;
    // SAFETY: the request is the kernel's own structure and lives through the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    ensure!(result == 0, "make the device {name}: {}", std::io::Error::last_os_error());
    Ok(file)
}

fn run(line: &str) -> Result<()> {
    let mut words = line.split(' ');
    let mut command = Command::new(words.next().context("a program")?);
    let status = command.args(words).status().with_context(|| line.to_owned())?;
    ensure!(status.success(), "{line}: {status}");
    Ok(())
}

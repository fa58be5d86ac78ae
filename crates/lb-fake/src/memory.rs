//! Maps that the daemon reads and writes by system calls: a per-CPU array, and a hash map.

use std::collections::BTreeMap;
use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lb_kernel::Elements;

use crate::faults::FaultInjection;

/// The number of CPUs.
pub const CPUS: usize = 2;

/// An array whose elements consist of 64-bit words for each CPU. The simulated programs access the
/// words of their CPU directly; the daemon reads and writes the elements of all CPUs through
/// [`Elements`].
#[derive(Clone)]
pub struct Array {
    words: Arc<[AtomicU64]>,
    /// The number of words of an element for one CPU.
    length: usize,
    /// The CPU on which the simulated programs run.
    cpu: Arc<AtomicUsize>,
    faults: Arc<FaultInjection>,
}

impl Array {
    /// An array of `elements` elements of `bytes` bytes each, all zero.
    pub fn new(
        elements: u32,
        bytes: usize,
        faults: &Arc<FaultInjection>,
        cpu: &Arc<AtomicUsize>,
    ) -> io::Result<Self> {
        assert!(bytes.is_multiple_of(8), "the values of these maps consist of words");
        let words = (0..elements as usize * CPUS * bytes / 8).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { words, length: bytes / 8, cpu: Arc::clone(cpu), faults: Arc::clone(faults) })
    }

    /// Reads the word of an element at `offset`, in bytes.
    pub fn load(&self, index: u32, offset: usize) -> u64 {
        self.words[self.position(index, offset)].load(Ordering::Relaxed)
    }

    pub fn add(&self, index: u32, offset: usize, amount: u64) {
        self.words[self.position(index, offset)].fetch_add(amount, Ordering::Relaxed);
    }

    pub fn store(&self, index: u32, offset: usize, word: u64) {
        self.words[self.position(index, offset)].store(word, Ordering::Relaxed);
    }

    /// The position of a word of the programs' CPU.
    fn position(&self, index: u32, offset: usize) -> usize {
        self.first(index) + self.cpu.load(Ordering::Relaxed) * self.length + offset / 8
    }

    /// The position of the first word of an element.
    fn first(&self, index: u32) -> usize {
        index as usize * CPUS * self.length
    }

    /// Reads the words of an element of all CPUs.
    fn read(&self, index: u32, value: &mut [u8]) {
        for (word, bytes) in self.words[self.first(index)..].iter().zip(value.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
    }

    fn elements(&self) -> usize {
        self.words.len() / (CPUS * self.length)
    }
}

fn index_of(key: &[u8]) -> u32 {
    u32::from_ne_bytes(key.try_into().expect("the key of an array has four bytes"))
}

impl Elements for Array {
    fn get(&self, key: &[u8], value: &mut [u8]) -> io::Result<bool> {
        self.faults.step()?;
        let index = index_of(key);
        let is_there = (index as usize) < self.elements();
        if is_there {
            self.read(index, value);
        }
        Ok(is_there)
    }

    fn set(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        self.faults.step()?;
        let index = index_of(key);
        if index as usize >= self.elements() {
            return Err(io::Error::from_raw_os_error(libc::E2BIG));
        }
        for (word, bytes) in self.words[self.first(index)..].iter().zip(value.chunks_exact(8)) {
            let bytes = bytes.try_into().expect("each chunk has eight bytes");
            word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
        }
        Ok(())
    }

    fn remove(&self, _: &[u8]) -> io::Result<bool> {
        Err(io::Error::from_raw_os_error(libc::EINVAL))
    }

    fn read_array(&self, first: u32, count: usize, values: &mut [u8]) -> io::Result<ControlFlow<()>> {
        self.faults.step()?;
        for (index, value) in (first..).zip(values.chunks_exact_mut(8 * CPUS * self.length)).take(count) {
            self.read(index, value);
        }
        Ok(ControlFlow::Continue(()))
    }

    fn visit(&self, _: usize, _: usize, _: &mut dyn FnMut(&[u8], &[u8])) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EINVAL))
    }
}

#[derive(Clone)]
pub struct Hash {
    entries: Arc<Mutex<BTreeMap<Vec<u8>, Vec<u8>>>>,
    capacity: u32,
    faults: Arc<FaultInjection>,
}

impl Hash {
    /// An empty hash with room for `capacity` entries.
    pub fn new(capacity: u32, faults: &Arc<FaultInjection>) -> Self {
        Self { entries: Arc::default(), capacity, faults: Arc::clone(faults) }
    }

    fn with<T>(&self, act: impl FnOnce(&mut BTreeMap<Vec<u8>, Vec<u8>>) -> T) -> io::Result<T> {
        self.faults.step()?;
        Ok(act(&mut self.entries()))
    }
}

/// The operations of the simulated programs, which cannot fail. Keys are cookies of sockets.
impl Hash {
    pub fn find<V: bytemuck::Pod>(&self, cookie: u64) -> Option<V> {
        self.entries().get(bytemuck::bytes_of(&cookie)).map(|value| bytemuck::pod_read_unaligned(value))
    }

    pub fn put<V: bytemuck::Pod>(&self, cookie: u64, value: &V) {
        let mut entries = self.entries();
        entries.insert(bytemuck::bytes_of(&cookie).to_vec(), bytemuck::bytes_of(value).to_vec());
        assert!(entries.len() <= self.capacity as usize, "no test opens so many sockets");
    }

    /// Removes an element. Returns whether it existed.
    pub fn take(&self, cookie: u64) -> bool {
        self.entries().remove(bytemuck::bytes_of(&cookie)).is_some()
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<Vec<u8>, Vec<u8>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Elements for Hash {
    fn get(&self, key: &[u8], value: &mut [u8]) -> io::Result<bool> {
        self.with(|entries| {
            let found = entries.get(key);
            found.inspect(|found| value.copy_from_slice(found)).is_some()
        })
    }

    fn set(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        self.with(|entries| {
            if entries.len() >= self.capacity as usize && !entries.contains_key(key) {
                return Err(io::Error::from_raw_os_error(libc::E2BIG));
            }
            entries.insert(key.to_vec(), value.to_vec());
            Ok(())
        })?
    }

    fn remove(&self, key: &[u8]) -> io::Result<bool> {
        self.with(|entries| entries.remove(key).is_some())
    }

    fn read_array(&self, _: u32, _: usize, _: &mut [u8]) -> io::Result<ControlFlow<()>> {
        Err(io::Error::from_raw_os_error(libc::EINVAL))
    }

    fn visit(&self, _: usize, _: usize, each: &mut dyn FnMut(&[u8], &[u8])) -> io::Result<()> {
        /// Bytes at an address that is a multiple of eight.
        fn aligned(bytes: &[u8]) -> Vec<u64> {
            let mut words = vec![0; bytes.len().div_ceil(8)];
            bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes.len()].copy_from_slice(bytes);
            words
        }
        self.with(|entries| {
            for (key, value) in entries {
                let words = (aligned(key), aligned(value));
                let (keys, values): (&[u8], &[u8]) =
                    (bytemuck::cast_slice(&words.0), bytemuck::cast_slice(&words.1));
                each(&keys[..key.len()], &values[..value.len()]);
            }
        })
    }
}

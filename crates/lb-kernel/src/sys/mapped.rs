//! Memory-mapped arrays that are shared with the kernel programs. The programs read and write the
//! arrays at any moment, so every access here is a volatile load or store of a whole word, or an
//! atomic instruction, and accesses are made in the order of the code.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags};

use crate::error::DatapathError;
use crate::sys;

/// An array that is mapped into this process's memory.
pub struct Mapped<T> {
    region: Arc<Region>,
    writable: bool,
    value: PhantomData<T>,
}

struct Region {
    memory: NonNull<u8>,
    bytes: usize,
}

// SAFETY: all accesses to the memory, which the kernel also uses, are volatile or atomic, and plain
// stores require `&mut Mapped`.
unsafe impl Send for Region {}
// SAFETY: as for `Send`; every write through `&Mapped` is atomic.
unsafe impl Sync for Region {}

impl<T: bytemuck::Pod> Mapped<T> {
    /// Maps the array that is pinned at `path`.
    ///
    /// # Errors
    /// If the array cannot be opened or mapped.
    pub fn open(path: &Path, writable: bool) -> Result<Self, DatapathError> {
        let fail = |error| DatapathError::Map { path: path.to_owned(), operation: "mmap", source: error };
        let fd = sys::open_pin(path).map_err(fail)?;
        let info = sys::map_info(fd.as_fd()).map_err(fail)?;
        Self::map(&fd, info.max_entries as usize * size_of::<T>(), writable).map_err(fail)
    }

    /// Maps the first `bytes` bytes of an array.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn map(fd: &OwnedFd, bytes: usize, writable: bool) -> io::Result<Self> {
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, 0) };
        let memory = NonNull::new(memory?.cast::<u8>()).expect("mmap does not return null");
        Ok(Self { region: Arc::new(Region { memory, bytes }), writable, value: PhantomData })
    }

    /// An array of zeros in this process's memory, which is not a map of the kernel.
    ///
    /// # Errors
    /// If memory is exhausted.
    pub fn in_memory(length: usize) -> io::Result<Self> {
        let (bytes, protection) = (length * size_of::<T>(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) };
        let memory = NonNull::new(memory?.cast::<u8>()).expect("mmap does not return null");
        Ok(Self { region: Arc::new(Region { memory, bytes }), writable: true, value: PhantomData })
    }

    /// A second handle to the same array.
    #[must_use]
    pub fn shared(&self) -> Self {
        Self { region: Arc::clone(&self.region), writable: self.writable, value: PhantomData }
    }

    pub fn length(&self) -> usize {
        self.region.bytes / size_of::<T>()
    }

    fn word<W>(&self, index: usize, offset: usize) -> *mut W {
        assert!(
            index < self.length(),
            "there is no element {index}; the array has {} elements",
            self.length()
        );
        assert!(offset + size_of::<W>() <= size_of::<T>() && offset.is_multiple_of(size_of::<W>()));
        // SAFETY: within the mapping by the checks above; the mapping is page-aligned and `T` a
        // multiple of a word.
        unsafe { self.region.memory.as_ptr().add(index * size_of::<T>() + offset).cast() }
    }

    /// Reads an element in words of 32 bits. If the element is written during the call, the result
    /// may contain old and new words.
    pub fn get(&self, index: usize) -> T {
        let mut value = T::zeroed();
        let words = bytemuck::bytes_of_mut(&mut value);
        for (i, bytes) in words.chunks_exact_mut(4).enumerate() {
            bytes.copy_from_slice(&self.load32(index, 4 * i).to_ne_bytes());
        }
        value
    }

    /// Reads one 64-bit word of an element with a single load. `offset` is in bytes.
    pub fn load64(&self, index: usize, offset: usize) -> u64 {
        // SAFETY: `word` checks bounds and alignment.
        unsafe { self.word::<u64>(index, offset).read_volatile() }
    }

    /// Like [`Mapped::load64`], for a word of 32 bits.
    pub fn load32(&self, index: usize, offset: usize) -> u32 {
        // SAFETY: `word` checks bounds and alignment.
        unsafe { self.word::<u32>(index, offset).read_volatile() }
    }

    fn atomic64(&self, index: usize, offset: usize) -> &AtomicU64 {
        assert!(self.writable, "the array was opened for reading only");
        // SAFETY: `word` checks bounds and alignment; the mapping lives as long as `self`. All
        // other accesses to such a word, by this process or by the kernel programs, are volatile or
        // atomic.
        unsafe { AtomicU64::from_ptr(self.word(index, offset)) }
    }

    /// Replaces a 64-bit word by a compare-and-swap, which is also atomic with respect to the
    /// kernel programs. Returns whether the word was `old`.
    pub fn replace64(&self, index: usize, offset: usize, old: u64, new: u64) -> bool {
        self.atomic64(index, offset).compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Writes a 64-bit word with a single store. Kernel programs or other processes may write the
    /// word at the same time.
    pub fn store_atomic64(&self, index: usize, offset: usize, word: u64) {
        self.atomic64(index, offset).store(word, Ordering::SeqCst);
    }

    /// Adds atomically to a number to which the kernel programs may also add; `u64::MAX` subtracts
    /// one.
    pub fn add64(&self, index: usize, offset: usize, amount: u64) {
        self.atomic64(index, offset).fetch_add(amount, Ordering::SeqCst);
    }

    /// Writes an element word by word.
    pub fn set(&mut self, index: usize, value: &T) {
        self.set_part(index, 0, value);
    }

    /// Writes the part of an element at `offset`, word by word.
    pub fn set_part<P: bytemuck::Pod>(&mut self, index: usize, offset: usize, part: &P) {
        assert!(self.writable, "the array was opened for reading only");
        for (i, bytes) in bytemuck::bytes_of(part).chunks_exact(4).enumerate() {
            let word = u32::from_ne_bytes(bytes.try_into().expect("each chunk has four bytes"));
            // SAFETY: `word` checks bounds and alignment.
            unsafe { self.word::<u32>(index, offset + 4 * i).write_volatile(word) };
        }
    }

    fn store<W>(&mut self, index: usize, offset: usize, word: W) {
        assert!(self.writable, "the array was opened for reading only");
        fence(Ordering::SeqCst);
        // SAFETY: `word` checks bounds and alignment.
        unsafe { self.word::<W>(index, offset).write_volatile(word) };
        fence(Ordering::SeqCst);
    }

    /// Writes one byte of an element, after all earlier writes.
    pub fn store8(&mut self, index: usize, offset: usize, byte: u8) {
        self.store(index, offset, byte);
    }

    /// Writes one 16-bit word of an element with a single store, after all earlier writes.
    pub fn store16(&mut self, index: usize, offset: usize, word: u16) {
        self.store(index, offset, word);
    }

    /// Writes one 32-bit word of an element with a single store, after all earlier writes.
    pub fn store32(&mut self, index: usize, offset: usize, word: u32) {
        self.store(index, offset, word);
    }

    /// Writes one 64-bit word of an element with a single store, after all earlier writes.
    pub fn store64(&mut self, index: usize, offset: usize, word: u64) {
        self.store(index, offset, word);
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: exactly the mapped memory; no reference into it outlives the arrays that share
        // it.
        let _ = unsafe { rustix::mm::munmap(self.memory.as_ptr().cast(), self.bytes) };
    }
}

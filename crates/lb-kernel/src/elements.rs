//! Maps whose elements are read and written by calls, as bytes: those of the kernel, and others that behave like them.

use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};

use crate::sys::elements;

/// A map. Keys and values are as long as the map's; a value of a per-CPU map is one value for each CPU.
pub trait Elements: Send + Sync {
    /// Reads one element into `value`. Returns whether it is there.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn get(&self, key: &[u8], value: &mut [u8]) -> io::Result<bool>;

    /// Writes one element.
    ///
    /// # Errors
    /// If the kernel refuses: E2BIG if a hash is full.
    fn set(&self, key: &[u8], value: &[u8]) -> io::Result<()>;

    /// Removes one element of a hash. Returns whether it was there.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn remove(&self, key: &[u8]) -> io::Result<bool>;

    /// Reads so many consecutive elements of an array from `first` on. Breaks if the kernel reads only one at a time.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn read_array(&self, first: u32, count: usize, values: &mut [u8]) -> io::Result<ControlFlow<()>>;

    /// Shows all elements of a hash, keys and values of these lengths, at addresses that are multiples of eight.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn visit(&self, key: usize, value: usize, each: &mut dyn FnMut(&[u8], &[u8])) -> io::Result<()>;
}

/// One of the kernel's.
impl Elements for OwnedFd {
    fn get(&self, key: &[u8], value: &mut [u8]) -> io::Result<bool> {
        elements::get_into(self.as_fd(), key, value)
    }

    fn set(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        elements::set(self.as_fd(), key, value)
    }

    fn remove(&self, key: &[u8]) -> io::Result<bool> {
        elements::remove(self.as_fd(), key)
    }

    fn read_array(&self, first: u32, count: usize, values: &mut [u8]) -> io::Result<ControlFlow<()>> {
        elements::read_array(self.as_fd(), first, count, values)
    }

    fn visit(&self, key: usize, value: usize, each: &mut dyn FnMut(&[u8], &[u8])) -> io::Result<()> {
        elements::visit_bytes(self.as_fd(), (key, value), each)
    }
}

/// One entry of a hash, if it is there.
///
/// # Errors
/// If the kernel refuses.
pub fn get<K: bytemuck::Pod, V: bytemuck::Pod>(map: &dyn Elements, key: &K) -> io::Result<Option<V>> {
    let mut value = V::zeroed();
    Ok(map.get(bytemuck::bytes_of(key), bytemuck::bytes_of_mut(&mut value))?.then_some(value))
}

/// All entries of a hash.
///
/// # Errors
/// If the kernel refuses.
pub fn entries<K: bytemuck::Pod, V: bytemuck::Pod>(map: &dyn Elements) -> io::Result<Vec<(K, V)>> {
    let mut entries = Vec::new();
    map.visit(size_of::<K>(), size_of::<V>(), &mut |key, value| {
        entries.push((*bytemuck::from_bytes(key), *bytemuck::from_bytes(value)));
    })?;
    Ok(entries)
}

/// Has a hash hold these keys and no other, each with the same value.
///
/// # Errors
/// If the kernel refuses.
pub fn have_keys<K: bytemuck::Pod + PartialEq, V: bytemuck::Pod>(
    map: &dyn Elements,
    keys: &[K],
    value: &V,
) -> io::Result<()> {
    for (old, _) in entries::<K, V>(map)?.iter().filter(|(old, _)| !keys.contains(old)) {
        map.remove(bytemuck::bytes_of(old))?;
    }
    for key in keys {
        map.set(bytemuck::bytes_of(key), bytemuck::bytes_of(value))?;
    }
    Ok(())
}

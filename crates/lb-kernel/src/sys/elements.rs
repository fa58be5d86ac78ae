//! Access to the contents of maps by system calls, element by element or in batches. The
//! implementation for maps of the kernel uses bpf(2); tests have other implementations.

use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::{bpf, raw};

/// A map. The lengths of keys and values must be those of the map; a value of a per-CPU map
/// consists of one value for each CPU.
pub trait Elements: Send + Sync {
    /// Reads one element into `value`. Returns whether it exists.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn get(&self, key: &[u8], value: &mut [u8]) -> io::Result<bool>;

    /// Writes one element.
    ///
    /// # Errors
    /// If the kernel refuses. The error is E2BIG if a hash is full.
    fn set(&self, key: &[u8], value: &[u8]) -> io::Result<()>;

    /// Removes one element of a hash. Returns whether it existed.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn remove(&self, key: &[u8]) -> io::Result<bool>;

    /// Reads `count` consecutive elements of an array, beginning with `first`. Returns `Break` if
    /// the kernel does not support batches for this map.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn read_array(&self, first: u32, count: usize, values: &mut [u8]) -> io::Result<ControlFlow<()>>;

    /// Calls `each` with all elements of a hash that exist during the whole call, and perhaps also
    /// with elements that are written or removed during the call. `key` and `value` are the lengths
    /// of keys and values. If a length is a multiple of eight bytes, the keys or values that `each`
    /// receives are aligned to eight bytes. The call uses the memory of one batch, regardless of
    /// the number of elements.
    ///
    /// # Errors
    /// If the kernel refuses.
    fn visit(&self, key: usize, value: usize, each: &mut dyn FnMut(&[u8], &[u8])) -> io::Result<()>;
}

/// One entry of a hash, if it exists.
///
/// # Errors
/// If the kernel refuses.
pub fn get<K: bytemuck::Pod, V: bytemuck::Pod>(map: &dyn Elements, key: &K) -> io::Result<Option<V>> {
    let mut value = V::zeroed();
    Ok(map.get(bytemuck::bytes_of(key), bytemuck::bytes_of_mut(&mut value))?.then_some(value))
}

/// Calls `each` with all entries of a hash, as [`Elements::visit`] does.
///
/// # Errors
/// If the kernel refuses.
pub fn visit<K: bytemuck::Pod, V: bytemuck::Pod>(
    map: &dyn Elements,
    mut each: impl FnMut(&K, &V),
) -> io::Result<()> {
    map.visit(size_of::<K>(), size_of::<V>(), &mut |key, value| {
        each(bytemuck::from_bytes(key), bytemuck::from_bytes(value));
    })
}

/// All entries of a hash.
///
/// # Errors
/// If the kernel refuses.
pub fn entries<K: bytemuck::Pod, V: bytemuck::Pod>(map: &dyn Elements) -> io::Result<Vec<(K, V)>> {
    let mut entries = Vec::new();
    visit(map, |key: &K, value: &V| entries.push((*key, *value)))?;
    Ok(entries)
}

/// Makes a hash contain these keys and no others, each with the same value.
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

const BPF_MAP_LOOKUP_ELEM: i64 = 1;
const BPF_MAP_UPDATE_ELEM: i64 = 2;
const BPF_MAP_DELETE_ELEM: i64 = 3;
const BPF_MAP_LOOKUP_BATCH: i64 = 24;
const BPF_MAP_LOOKUP_AND_DELETE_BATCH: i64 = 25;

/// `ENOTSUPP`, which the C library lacks: the kernel's error for map types without batches.
const NOT_SUPPORTED: i32 = 524;

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Batch {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

impl Batch {
    fn of<K, V>(map: BorrowedFd<'_>, count: usize, keys: &mut [K], values: &mut [V]) -> io::Result<Self> {
        Ok(Self {
            in_batch: 0,
            out_batch: 0,
            keys: keys.as_mut_ptr().addr() as u64,
            values: values.as_mut_ptr().addr() as u64,
            count: u32::try_from(count).map_err(io::Error::other)?,
            map_fd: raw(map),
            elem_flags: 0,
            flags: 0,
        })
    }
}

/// Removes at most one batch (4,096) of the entries of a hash, and calls `each` for each removed
/// entry. Entries that are written during the call are not lost: this call or a later call removes
/// them. Returns `true` if the hash has no further entries. If the result is `false`, call the
/// function again.
pub fn take_some<K: bytemuck::Pod, V: bytemuck::Pod>(
    map: BorrowedFd<'_>,
    mut each: impl FnMut(&K, &V),
) -> io::Result<bool> {
    let each = |key: &[u8], value: &[u8]| each(bytemuck::from_bytes(key), bytemuck::from_bytes(value));
    by_batches(map, BPF_MAP_LOOKUP_AND_DELETE_BATCH, 1, (size_of::<K>(), size_of::<V>()), each)
}

/// Calls `each` with the elements of a hash, in at most this number of batches. Returns whether the
/// last batch reached the end of the hash.
fn by_batches(
    map: BorrowedFd<'_>,
    command: i64,
    batches: usize,
    (key, value): (usize, usize),
    mut each: impl FnMut(&[u8], &[u8]),
) -> io::Result<bool> {
    /// Number of elements of a batch. A call fails with ENOSPC if a single bucket of the hash
    /// contains more elements; buckets contain about one element.
    const CHUNK: usize = 4096;
    // The buffers consist of words, so that elements at multiples of eight bytes are aligned for a
    // reference.
    let words = |bytes: usize| vec![0_u64; (CHUNK * bytes).div_ceil(8)];
    let (mut keys, mut values) = (words(key), words(value));
    // The number of the bucket at which the kernel continues.
    let mut position = 0u64;
    let mut first = true;
    // Bound: each call advances by at least one bucket.
    for _ in 0..batches {
        let mut attr = Batch::of(map, CHUNK, &mut keys, &mut values)?;
        attr.in_batch = if first { 0 } else { std::ptr::from_ref(&position).addr() as u64 };
        let mut next = 0u64;
        attr.out_batch = std::ptr::from_mut(&mut next).addr() as u64;
        let result = bpf(command, &mut attr);
        // With the last batch, the kernel returns ENOENT.
        let last = matches!(&result, Err(error) if error.raw_os_error() == Some(libc::ENOENT));
        if !last {
            result?;
        }
        let found = attr.count as usize;
        let (keys, values): (&[u8], &[u8]) = (bytemuck::cast_slice(&keys), bytemuck::cast_slice(&values));
        for (key, value) in keys.chunks_exact(key).zip(values.chunks_exact(value)).take(found) {
            each(key, value);
        }
        if last {
            return Ok(true);
        }
        (position, first) = (next, false);
    }
    Ok(false)
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Element {
    map_fd: u32,
    _pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

impl Element {
    fn of(map: &OwnedFd, key: &[u8]) -> Self {
        Self { map_fd: raw(map.as_fd()), _pad: 0, key: key.as_ptr().addr() as u64, value: 0, flags: 0 }
    }
}

/// A map of the kernel, identified by its descriptor.
impl Elements for OwnedFd {
    fn get(&self, key: &[u8], value: &mut [u8]) -> io::Result<bool> {
        let mut attr = Element::of(self, key);
        attr.value = value.as_mut_ptr().addr() as u64;
        present(bpf(BPF_MAP_LOOKUP_ELEM, &mut attr))
    }

    fn set(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        let mut attr = Element::of(self, key);
        attr.value = value.as_ptr().addr() as u64;
        bpf(BPF_MAP_UPDATE_ELEM, &mut attr).map(drop)
    }

    fn remove(&self, key: &[u8]) -> io::Result<bool> {
        present(bpf(BPF_MAP_DELETE_ELEM, &mut Element::of(self, key)))
    }

    fn read_array(&self, first: u32, count: usize, values: &mut [u8]) -> io::Result<ControlFlow<()>> {
        let mut keys = vec![0u32; count];
        let mut attr = Batch::of(self.as_fd(), count, &mut keys, values)?;
        // The kernel begins with the element after this position.
        let before = first.wrapping_sub(1);
        attr.in_batch = if first == 0 { 0 } else { std::ptr::from_ref(&before).addr() as u64 };
        let mut last = 0u32;
        attr.out_batch = std::ptr::from_mut(&mut last).addr() as u64;
        match bpf(BPF_MAP_LOOKUP_BATCH, &mut attr) {
            Ok(_) => {}
            // The batch reached the end of the array.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            Err(error) if matches!(error.raw_os_error(), Some(NOT_SUPPORTED | libc::EINVAL)) => {
                return Ok(ControlFlow::Break(()));
            }
            Err(error) => return Err(error),
        }
        if attr.count as usize == count {
            return Ok(ControlFlow::Continue(()));
        }
        Err(io::Error::other(format!("the kernel returned {} of {count} elements", attr.count)))
    }

    fn visit(&self, key: usize, value: usize, each: &mut dyn FnMut(&[u8], &[u8])) -> io::Result<()> {
        by_batches(self.as_fd(), BPF_MAP_LOOKUP_BATCH, usize::MAX, (key, value), each).map(drop)
    }
}

fn present(result: io::Result<i64>) -> io::Result<bool> {
    match result {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

//! What lies in maps: elements read and written one by one or many at a time, by `bpf(2)` itself.

use std::io;
use std::ops::ControlFlow;
use std::os::fd::BorrowedFd;

use super::{bpf, raw};

const BPF_MAP_LOOKUP_ELEM: i64 = 1;
const BPF_MAP_UPDATE_ELEM: i64 = 2;
const BPF_MAP_DELETE_ELEM: i64 = 3;
const BPF_MAP_LOOKUP_BATCH: i64 = 24;
const BPF_MAP_LOOKUP_AND_DELETE_BATCH: i64 = 25;

/// `ENOTSUPP`: how the kernel says that maps of a type know no batches. The C library does not have it.
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

/// Shows all entries of a hash: those that are there from the beginning of the call to its end, and perhaps others.
/// Takes as much memory as one batch, however many there are.
pub fn visit<K: bytemuck::Pod, V: bytemuck::Pod>(
    map: BorrowedFd<'_>,
    mut each: impl FnMut(&K, &V),
) -> io::Result<()> {
    let each = |key: &[u8], value: &[u8]| each(bytemuck::from_bytes(key), bytemuck::from_bytes(value));
    visit_bytes(map, (size_of::<K>(), size_of::<V>()), each)
}

/// The same, of keys and values of these lengths, at addresses that are multiples of eight if the lengths are.
pub fn visit_bytes(
    map: BorrowedFd<'_>,
    lengths: (usize, usize),
    each: impl FnMut(&[u8], &[u8]),
) -> io::Result<()> {
    by_batches(map, BPF_MAP_LOOKUP_BATCH, usize::MAX, lengths, each).map(drop)
}

/// Takes entries out of a hash, some thousand at most, and shows them. What is written meanwhile is taken out now or later, and not
/// lost. Returns whether these were all.
pub fn take_some<K: bytemuck::Pod, V: bytemuck::Pod>(
    map: BorrowedFd<'_>,
    mut each: impl FnMut(&K, &V),
) -> io::Result<bool> {
    let each = |key: &[u8], value: &[u8]| each(bytemuck::from_bytes(key), bytemuck::from_bytes(value));
    by_batches(map, BPF_MAP_LOOKUP_AND_DELETE_BATCH, 1, (size_of::<K>(), size_of::<V>()), each)
}

/// Returns whether the last of so many batches was reached.
fn by_batches(
    map: BorrowedFd<'_>,
    command: i64,
    batches: usize,
    (key, value): (usize, usize),
    mut each: impl FnMut(&[u8], &[u8]),
) -> io::Result<bool> {
    /// A call fails with ENOSPC if a single bucket holds more; buckets of a hash hold about one.
    const CHUNK: usize = 4096;
    // Words, so that whatever begins with one is where a reference to it may lead.
    let words = |bytes: usize| vec![0_u64; (CHUNK * bytes).div_ceil(8)];
    let (mut keys, mut values) = (words(key), words(value));
    // Where the kernel goes on: the number of a bucket.
    let mut position = 0u64;
    let mut first = true;
    // Bound: each call is at least one bucket further.
    for _ in 0..batches {
        let mut attr = Batch::of(map, CHUNK, &mut keys, &mut values)?;
        attr.in_batch = if first { 0 } else { std::ptr::from_ref(&position).addr() as u64 };
        let mut next = 0u64;
        attr.out_batch = std::ptr::from_mut(&mut next).addr() as u64;
        let result = bpf(command, &mut attr);
        // ENOENT is how the kernel says that these were the last.
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

/// All entries of a hash, as [`visit`] shows them.
pub fn entries<K: bytemuck::Pod, V: bytemuck::Pod>(map: BorrowedFd<'_>) -> io::Result<Vec<(K, V)>> {
    let mut entries = Vec::new();
    visit(map, |key: &K, value: &V| entries.push((*key, *value)))?;
    Ok(entries)
}

/// Reads consecutive elements of a per-CPU array from `first` on into `values`, which has as many values for each
/// element as there are CPUs. Breaks if the kernel has no batches for such a map.
pub fn read_array<V: bytemuck::Pod>(
    map: BorrowedFd<'_>,
    first: u32,
    elements: usize,
    values: &mut [V],
) -> io::Result<ControlFlow<()>> {
    let mut keys = vec![0u32; elements];
    let mut attr = Batch::of(map, elements, &mut keys, values)?;
    // The kernel goes on after the element that it is given.
    let before = first.wrapping_sub(1);
    attr.in_batch = if first == 0 { 0 } else { std::ptr::from_ref(&before).addr() as u64 };
    let mut last = 0u32;
    attr.out_batch = std::ptr::from_mut(&mut last).addr() as u64;
    match bpf(BPF_MAP_LOOKUP_BATCH, &mut attr) {
        Ok(_) => {}
        // The end of the array.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
        Err(error) if matches!(error.raw_os_error(), Some(NOT_SUPPORTED | libc::EINVAL)) => {
            return Ok(ControlFlow::Break(()));
        }
        Err(error) => return Err(error),
    }
    if attr.count as usize == elements {
        return Ok(ControlFlow::Continue(()));
    }
    Err(io::Error::other(format!("the kernel gave {} elements of {elements}", attr.count)))
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
    fn of<K: ?Sized>(map: BorrowedFd<'_>, key: &K) -> Self {
        let key = std::ptr::from_ref(key).addr() as u64;
        Self { map_fd: raw(map), _pad: 0, key, value: 0, flags: 0 }
    }
}

/// One entry of a hash, if it is there.
pub fn get<K: bytemuck::Pod, V: bytemuck::Pod>(map: BorrowedFd<'_>, key: &K) -> io::Result<Option<V>> {
    let mut value = V::zeroed();
    Ok(get_into(map, key, std::slice::from_mut(&mut value))?.then_some(value))
}

/// Reads one element into `values`: one value, or one for each CPU. Returns whether it is there.
pub fn get_into<K: ?Sized, V: bytemuck::Pod>(
    map: BorrowedFd<'_>,
    key: &K,
    values: &mut [V],
) -> io::Result<bool> {
    let mut attr = Element::of(map, key);
    attr.value = values.as_mut_ptr().addr() as u64;
    present(bpf(BPF_MAP_LOOKUP_ELEM, &mut attr))
}

/// Writes one element: one value, or one for each CPU.
pub fn set<K: ?Sized, V: bytemuck::Pod>(map: BorrowedFd<'_>, key: &K, values: &[V]) -> io::Result<()> {
    let mut attr = Element::of(map, key);
    attr.value = values.as_ptr().addr() as u64;
    bpf(BPF_MAP_UPDATE_ELEM, &mut attr).map(drop)
}

/// Removes one entry of a hash. Returns whether it was there.
pub fn remove<K: ?Sized>(map: BorrowedFd<'_>, key: &K) -> io::Result<bool> {
    present(bpf(BPF_MAP_DELETE_ELEM, &mut Element::of(map, key)))
}

fn present(result: io::Result<i64>) -> io::Result<bool> {
    match result {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

//! Pinned maps as an operator with bpftool sees and changes them.

use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use aya::maps::{Array, HashMap, Map, MapData, PerCpuArray};
use aya_obj::generated::bpf_cmd;

use crate::sys::{attributes, bpf};

/// A wrapper that permits aya to copy a value to and from the kernel.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct Raw<T>(pub T);

// SAFETY: bytemuck's `Pod` guarantees what aya's requires: every bit pattern is a value, and there
// is no padding.
unsafe impl<T: bytemuck::Pod> aya::Pod for Raw<T> {}

/// Opens an array map by its pin.
pub fn array<T: bytemuck::Pod>(pin: &Path) -> Array<MapData, Raw<T>> {
    Array::try_from(open(pin)).expect("the map is an array of this shape")
}

/// Opens a hash map by its pin.
pub fn hash<K: bytemuck::Pod, V: bytemuck::Pod>(pin: &Path) -> HashMap<MapData, Raw<K>, Raw<V>> {
    HashMap::try_from(open(pin)).expect("the map is a hash map of this shape")
}

/// Opens a per-CPU array map by its pin.
pub fn per_cpu<T: bytemuck::Pod>(pin: &Path) -> PerCpuArray<MapData, Raw<T>> {
    PerCpuArray::try_from(open(pin)).expect("the map is a per-CPU array of this shape")
}

/// All values of a pinned array map, in one call: one call per entry takes seconds in a guest.
pub fn values<T: bytemuck::Pod>(pin: &Path) -> Vec<T> {
    let data = MapData::from_pin(pin).unwrap_or_else(|error| panic!("open {}: {error}", pin.display()));
    let info = data.info().expect("read the map's description");
    assert_eq!(
        info.value_size() as usize,
        size_of::<T>(),
        "the values of {} have the expected size",
        pin.display()
    );
    let mut count = info.max_entries();
    let mut keys = vec![0u32; count as usize];
    let mut values = vec![T::zeroed(); count as usize];
    let mut next = 0u32;
    let mut attr = attributes();
    attr.batch.out_batch = (&raw mut next) as u64;
    attr.batch.keys = keys.as_mut_ptr() as u64;
    attr.batch.values = values.as_mut_ptr() as u64;
    attr.batch.count = count;
    attr.batch.map_fd = data.fd().as_fd().as_raw_fd().cast_unsigned();
    // SAFETY: the arrays have room for as many keys and values as the call requests, and outlive
    // the call.
    let result = unsafe { bpf(bpf_cmd::BPF_MAP_LOOKUP_BATCH, &mut attr) };
    match result {
        Ok(_) => {}
        // The kernel reports the end of the map as ENOENT.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
        Err(error) => panic!("read all entries of {}: {error}", pin.display()),
    }
    // SAFETY: the call has stored how many entries it found.
    count = unsafe { attr.batch.count };
    values.truncate(count as usize);
    values
}

/// Stores all values of a pinned array map, in one call.
pub fn set_all<T: bytemuck::Pod>(pin: &Path, values: &mut [T]) {
    let data = MapData::from_pin(pin).unwrap_or_else(|error| panic!("open {}: {error}", pin.display()));
    let mut keys: Vec<u32> = (0..).take(values.len()).collect();
    let mut attr = attributes();
    attr.batch.keys = keys.as_mut_ptr() as u64;
    attr.batch.values = values.as_mut_ptr() as u64;
    attr.batch.count = u32::try_from(values.len()).expect("the count fits into 32 bits");
    attr.batch.map_fd = data.fd().as_fd().as_raw_fd().cast_unsigned();
    // SAFETY: the arrays have as many keys and values as the call states, and outlive the call.
    let result = unsafe { bpf(bpf_cmd::BPF_MAP_UPDATE_BATCH, &mut attr) };
    result.unwrap_or_else(|error| panic!("store all entries of {}: {error}", pin.display()));
}

fn open(pin: &Path) -> Map {
    let data = MapData::from_pin(pin).unwrap_or_else(|error| panic!("open {}: {error}", pin.display()));
    Map::from_map_data(data).expect("the map's kind is known")
}

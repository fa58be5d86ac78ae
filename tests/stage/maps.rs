//! Pinned maps as an operator with bpftool sees and changes them.

use std::path::Path;

use aya::maps::{Array, HashMap, Map, MapData, PerCpuArray};

/// A value that aya may copy to and from the kernel.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct Raw<T>(pub T);

// SAFETY: bytemuck's `Pod` promises what aya's asks for: any bits are a value, and there is no padding.
unsafe impl<T: bytemuck::Pod> aya::Pod for Raw<T> {}

/// An array map by its pin.
pub fn array<T: bytemuck::Pod>(pin: &Path) -> Array<MapData, Raw<T>> {
    Array::try_from(open(pin)).expect("an array of this shape")
}

/// A hash map by its pin.
pub fn hash<K: bytemuck::Pod, V: bytemuck::Pod>(pin: &Path) -> HashMap<MapData, Raw<K>, Raw<V>> {
    HashMap::try_from(open(pin)).expect("a hash of this shape")
}

/// A per-CPU array map by its pin.
pub fn per_cpu<T: bytemuck::Pod>(pin: &Path) -> PerCpuArray<MapData, Raw<T>> {
    PerCpuArray::try_from(open(pin)).expect("a per-CPU array of this shape")
}

fn open(pin: &Path) -> Map {
    let data = MapData::from_pin(pin).unwrap_or_else(|error| panic!("open {}: {error}", pin.display()));
    Map::from_map_data(data).expect("a map")
}

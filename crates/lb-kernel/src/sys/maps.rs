//! Reads the properties of maps with bpf(2), and updates a map of maps, for which the kernel waits
//! until running programs have ended.
//!
//! aya opens a pin without checking that it is a map. This module must not depend on the purpose of
//! any map.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use super::elements::Elements as _;
use super::{bpf_fd, info, raw};

const BPF_MAP_CREATE: i64 = 0;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_MAP_TYPE_ARRAY_OF_MAPS: u32 = 12;

/// The properties of a map: the first fields of `struct bpf_map_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct MapInfo {
    pub kind: u32,
    pub id: u32,
    pub key_size: u32,
    pub value_size: u32,
    pub max_entries: u32,
    pub flags: u32,
}

/// The properties of a map. Fails with EINVAL if `map` is not a map.
pub fn map_info(map: BorrowedFd<'_>) -> io::Result<MapInfo> {
    // The kernel also reports properties of programs and links; only the name of the descriptor
    // shows the type of the object.
    let target = std::fs::read_link(format!("/proc/self/fd/{}", raw(map)))?;
    if target != Path::new("anon_inode:bpf-map") {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a map"));
    }
    info(map)
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    inner_map_fd: u32,
}

/// Creates an array and a map of maps, and stores the array in the map. The kernel returns from
/// this update only after a grace period.
pub fn update_map_of_maps() -> io::Result<()> {
    let create = |map_type, inner_map_fd| {
        let mut attr =
            MapCreate { map_type, key_size: 4, value_size: 4, max_entries: 1, map_flags: 0, inner_map_fd };
        bpf_fd(BPF_MAP_CREATE, &mut attr)
    };
    let inner = create(BPF_MAP_TYPE_ARRAY, 0)?;
    let outer = create(BPF_MAP_TYPE_ARRAY_OF_MAPS, raw(inner.as_fd()))?;
    outer.set(bytemuck::bytes_of(&0u32), bytemuck::bytes_of(&raw(inner.as_fd())))
}

//! The positions of fields in the kernel's structures, from the kernel's own description of its
//! types (BTF, `/sys/kernel/btf/vmlinux`).
//!
//! The kernel's `Documentation/bpf/btf.rst` describes the layout. socklb has its own parser because
//! the existing parsers have private types, or a license that is incompatible with socklb's.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

/// Positions of fields, in bytes from the beginning of a `struct tcp_sock`, unless a comment names
/// another structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offsets {
    pub sk_err: u32,
    pub sk_err_soft: u32,
    pub srtt_us: u32,
    pub total_retrans: u32,
    pub bytes_received: u32,
    pub bytes_acked: u32,
    pub icsk_syn_retries: u32,
    pub bpf_sock_ops_cb_flags: u32,
    /// The byte that contains the bit `sk_kern_sock`.
    pub sk_kern_sock: u32,
    /// The mask of the bit `sk_kern_sock`.
    pub sk_kern_sock_mask: u32,
    /// The first message of `sk_error_queue`.
    pub error_queue: u32,
    /// The length of `sk_error_queue`.
    pub error_queue_length: u32,
    /// In a `struct sk_buff` of `sk_error_queue`, its `struct sock_extended_err`.
    pub queued_error: u32,
    pub bound_device: u32,
    pub socket_mark: u32,
    /// The byte in which `sk_userlocks` begins.
    pub user_locks: u32,
    /// The mask of the bits of `sk_userlocks` for a bound address or a bound port.
    pub user_locks_mask: u32,
    pub socket_filter: u32,
    pub socket_flags: u32,
    pub unicast_ttl: u32,
    /// The numbers with which programs get pointers to the kernel's own structures without a
    /// helper; `None` if the kernel lacks the function `bpf_rdonly_cast`.
    pub casts: Option<Casts>,
}

/// The function that returns pointers to the kernel's own structures, and the fields that programs
/// read through these pointers. Functions and types are identified by their numbers in the kernel's
/// BTF. Fields are positions in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Casts {
    pub bpf_rdonly_cast: u32,
    /// The numbers of the types of the structures with these names.
    pub tcp_sock: u32,
    pub bpf_sock_ops_kern: u32,
    /// The field `sk` in a `struct bpf_sock_ops_kern`.
    pub sock_ops_sk: u32,
    /// The fields `skc_cookie` and `skc_net` in a `struct sock`.
    pub skc_cookie: u32,
    pub skc_net: u32,
    /// The field `net_cookie` in a `struct net`.
    pub net_cookie: u32,
}

impl Offsets {
    /// The name and the value of each offset, and of each field of `Casts`.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u32)> {
        let casts = self.casts.iter().flat_map(|casts| {
            [
                ("bpf_rdonly_cast", casts.bpf_rdonly_cast),
                ("tcp_sock", casts.tcp_sock),
                ("bpf_sock_ops_kern", casts.bpf_sock_ops_kern),
                ("sock_ops_sk", casts.sock_ops_sk),
                ("skc_cookie", casts.skc_cookie),
                ("skc_net", casts.skc_net),
                ("net_cookie", casts.net_cookie),
            ]
        });
        let fields = [
            ("sk_err", self.sk_err),
            ("sk_err_soft", self.sk_err_soft),
            ("srtt_us", self.srtt_us),
            ("total_retrans", self.total_retrans),
            ("bytes_received", self.bytes_received),
            ("bytes_acked", self.bytes_acked),
            ("icsk_syn_retries", self.icsk_syn_retries),
            ("bpf_sock_ops_cb_flags", self.bpf_sock_ops_cb_flags),
            ("sk_kern_sock", self.sk_kern_sock),
            ("sk_kern_sock_mask", self.sk_kern_sock_mask),
            ("error_queue", self.error_queue),
            ("error_queue_length", self.error_queue_length),
            ("queued_error", self.queued_error),
            ("bound_device", self.bound_device),
            ("socket_mark", self.socket_mark),
            ("user_locks", self.user_locks),
            ("user_locks_mask", self.user_locks_mask),
            ("socket_filter", self.socket_filter),
            ("socket_flags", self.socket_flags),
            ("unicast_ttl", self.unicast_ttl),
        ];
        fields.into_iter().chain(casts)
    }
}

/// The file with the kernel's BTF.
pub const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

const MAGIC: u16 = 0xeb9f;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_FUNCTION: u32 = 12;

/// Reads the positions of the fields that the programs read.
///
/// # Errors
/// If the kernel has no BTF, or if a type or field is missing in it.
pub fn offsets(path: &Path) -> io::Result<Offsets> {
    let bytes = std::fs::read(path)?;
    let sockets = ["sock", "sock_common", "inet_sock", "inet_connection_sock", "tcp_sock"];
    let queues = ["sk_buff_head", "sk_buff", "sock_exterr_skb"];
    let structures = [&sockets[..], &queues, &["net", "bpf_sock_ops_kern"]].concat();
    let types = Types::parse(&bytes, &structures, &["bpf_rdonly_cast"]);
    let types = types.ok_or_else(|| invalid("is not valid BTF"))?;
    let bits = |structure: &str, field: &str| {
        let missing = || invalid(&format!("has no field {field} in structure {structure}"));
        types.field(structure, field).ok_or_else(missing)
    };
    let field = |structure: &str, field: &str| match bits(structure, field)? {
        bits if bits % 8 == 0 => Ok(bits / 8),
        _ => Err(invalid(&format!("has a field {field} inside a byte of structure {structure}"))),
    };
    // The programs run only on little-endian processors, where the positions of bit fields count
    // from the lowest bit.
    let kernels = bits("sock", "sk_kern_sock")?;
    let locks = bits("sock", "sk_userlocks")?;
    let queue = field("sock", "sk_error_queue")?;
    let common = field("sock", "__sk_common")?;
    Ok(Offsets {
        sk_err: field("sock", "sk_err")?,
        sk_err_soft: field("sock", "sk_err_soft")?,
        srtt_us: field("tcp_sock", "srtt_us")?,
        total_retrans: field("tcp_sock", "total_retrans")?,
        bytes_received: field("tcp_sock", "bytes_received")?,
        bytes_acked: field("tcp_sock", "bytes_acked")?,
        icsk_syn_retries: field("inet_connection_sock", "icsk_syn_retries")?,
        bpf_sock_ops_cb_flags: field("tcp_sock", "bpf_sock_ops_cb_flags")?,
        sk_kern_sock: kernels / 8,
        sk_kern_sock_mask: 1 << (kernels % 8),
        error_queue: queue + field("sk_buff_head", "next")?,
        error_queue_length: queue + field("sk_buff_head", "qlen")?,
        queued_error: field("sk_buff", "cb")? + field("sock_exterr_skb", "ee")?,
        bound_device: common + field("sock_common", "skc_bound_dev_if")?,
        socket_mark: field("sock", "sk_mark")?,
        user_locks: locks / 8,
        // SOCK_BINDADDR_LOCK and SOCK_BINDPORT_LOCK.
        user_locks_mask: (4 | 8) << (locks % 8),
        socket_filter: field("sock", "sk_filter")?,
        socket_flags: common + field("sock_common", "skc_flags")?,
        unicast_ttl: field("inet_sock", "uc_ttl")?,
        casts: types.casts(),
    })
}

/// The positions of the fields that lead from an open file to the cookie of its socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileOffsets {
    /// The fields `f_inode` and `private_data` in a `struct file`.
    pub inode: u32,
    pub private_data: u32,
    /// The field `i_mode` in a `struct inode`.
    pub mode: u32,
    /// The field `sk` in a `struct socket`.
    pub sock: u32,
    /// The field `skc_cookie` in a `struct sock`, which begins with a `struct sock_common`.
    pub cookie: u32,
}

/// Reads the positions of the fields that the iterator over open files reads.
///
/// # Errors
/// If the kernel has no BTF, or if a type or field is missing in it.
pub fn file_offsets(path: &Path) -> io::Result<FileOffsets> {
    let bytes = std::fs::read(path)?;
    let types = Types::parse(&bytes, &["file", "inode", "socket", "sock", "sock_common"], &[]);
    let types = types.ok_or_else(|| invalid("is not valid BTF"))?;
    let field = |structure: &str, field: &str| match types.field(structure, field) {
        Some(bits) if bits % 8 == 0 => Ok(bits / 8),
        _ => Err(invalid(&format!("has no field {field} in structure {structure}"))),
    };
    Ok(FileOffsets {
        inode: field("file", "f_inode")?,
        private_data: field("file", "private_data")?,
        mode: field("inode", "i_mode")?,
        sock: field("socket", "sk")?,
        cookie: field("sock", "__sk_common")? + field("sock_common", "skc_cookie")?,
    })
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{VMLINUX} {what}"))
}

struct Types<'b> {
    /// The section of types: all types, one after the other.
    types: &'b [u8],
    /// The position of each type in the section. Type number 0 is `void` and has no position.
    starts: Vec<usize>,
    /// The position and the number of each requested structure, keyed by its name.
    structures: BTreeMap<&'static str, (usize, u32)>,
    /// The number of each requested function, keyed by its name.
    functions: BTreeMap<&'static str, u32>,
    strings: &'b [u8],
}

/// The first words of a type's description.
struct Type {
    name: u32,
    kind: u32,
    members: usize,
    has_bit_fields: bool,
}

impl<'b> Types<'b> {
    /// Finds the positions of all types and, in the same pass over several hundred thousand types,
    /// the structures and functions with these names.
    fn parse(bytes: &'b [u8], structures: &[&'static str], functions: &[&'static str]) -> Option<Self> {
        let magic = u16::from_le_bytes(bytes.get(..2)?.try_into().ok()?);
        if magic != MAGIC {
            return None;
        }
        let header = word(bytes, 4)? as usize;
        let section = |offset: u32, length: u32| {
            let start = header.checked_add(offset as usize)?;
            bytes.get(start..start.checked_add(length as usize)?)
        };
        let types = section(word(bytes, 8)?, word(bytes, 12)?)?;
        let strings = section(word(bytes, 16)?, word(bytes, 20)?)?;
        let mut found = Self {
            types,
            starts: vec![usize::MAX],
            structures: BTreeMap::new(),
            functions: BTreeMap::new(),
            strings,
        };
        let mut at = 0;
        // Bound: each iteration advances by one type, which has at least twelve bytes.
        while at < types.len() {
            let number = u32::try_from(found.starts.len()).ok()?;
            found.starts.push(at);
            let this = found.at(at)?;
            let called =
                |names: &[&'static str]| names.iter().find(|name| found.is_called(&this, name)).copied();
            if this.kind == KIND_STRUCT
                && let Some(name) = called(structures)
            {
                found.structures.entry(name).or_insert((at, number));
            } else if this.kind == KIND_FUNCTION
                && let Some(name) = called(functions)
            {
                found.functions.entry(name).or_insert(number);
            }
            at += 12 + extra(&this)?;
        }
        Some(found)
    }

    fn at(&self, at: usize) -> Option<Type> {
        let info = word(self.types, at + 4)?;
        Some(Type {
            name: word(self.types, at)?,
            kind: (info >> 24) & 0x1f,
            members: (info & 0xffff) as usize,
            has_bit_fields: info >> 31 != 0,
        })
    }

    /// The position of a field in bits. The field may also be one of an unnamed structure or union
    /// inside the structure.
    fn field(&self, structure: &str, field: &str) -> Option<u32> {
        let (start, _) = *self.structures.get(structure)?;
        // The structures still to be searched, and their positions in bits.
        let mut pending = vec![(start, 0)];
        // Bound: unnamed structures nest a few levels deep.
        while let Some((start, base)) = pending.pop() {
            let outer = self.at(start)?;
            for member in 0..outer.members {
                let at = start + 12 + 12 * member;
                let offset = word(self.types, at + 8)?;
                let offset = base + if outer.has_bit_fields { offset & 0x00ff_ffff } else { offset };
                match self.string(word(self.types, at)?)? {
                    b"" => {
                        let inner = *self.starts.get(word(self.types, at + 4)? as usize)?;
                        if self.at(inner).is_some_and(|inner| [KIND_STRUCT, KIND_UNION].contains(&inner.kind))
                        {
                            pending.push((inner, offset));
                        }
                    }
                    name if name == field.as_bytes() => return Some(offset),
                    _ => {}
                }
            }
        }
        None
    }

    fn casts(&self) -> Option<Casts> {
        let field =
            |structure, field| self.field(structure, field).filter(|bits| bits % 8 == 0).map(|bits| bits / 8);
        let structure = |name| self.structures.get(name).map(|(_, number)| *number);
        let common = field("sock", "__sk_common")?;
        Some(Casts {
            bpf_rdonly_cast: *self.functions.get("bpf_rdonly_cast")?,
            tcp_sock: structure("tcp_sock")?,
            bpf_sock_ops_kern: structure("bpf_sock_ops_kern")?,
            sock_ops_sk: field("bpf_sock_ops_kern", "sk")?,
            skc_cookie: common + field("sock_common", "skc_cookie")?,
            skc_net: common + field("sock_common", "skc_net")?,
            net_cookie: field("net", "net_cookie")?,
        })
    }

    fn is_called(&self, this: &Type, name: &str) -> bool {
        let rest = self.strings.get(this.name as usize..).and_then(|from| from.strip_prefix(name.as_bytes()));
        rest.is_some_and(|rest| rest.first() == Some(&0))
    }

    fn string(&self, at: u32) -> Option<&'b [u8]> {
        self.strings.get(at as usize..)?.split(|byte| *byte == 0).next()
    }
}

/// The number of bytes of a type's description after its first three words; `None` for an unknown
/// kind.
fn extra(this: &Type) -> Option<usize> {
    /// The kinds without further bytes: `FWD`, `TYPEDEF`, `VOLATILE`, `CONST`, `RESTRICT`, `FUNC`,
    /// `FLOAT`, `TYPE_TAG`, and `PTR`.
    const BARE: [u32; 9] = [2, 7, 8, 9, 10, 11, 12, 16, 18];
    Some(match this.kind {
        kind if BARE.contains(&kind) => 0,
        // INT, VAR, DECL_TAG
        1 | 14 | 17 => 4,
        // ARRAY
        3 => 12,
        // STRUCT, UNION, DATASEC, ENUM64
        KIND_STRUCT | KIND_UNION | 15 | 19 => 12 * this.members,
        // ENUM, FUNC_PROTO
        6 | 13 => 8 * this.members,
        _ => return None,
    })
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// BTF with these strings, and with types that consist of these words.
    fn description(strings: &[u8], types: &[u32]) -> Vec<u8> {
        let types: Vec<u8> = types.iter().flat_map(|word| word.to_le_bytes()).collect();
        let lengths = [types.len(), strings.len()].map(|length| u32::try_from(length).unwrap());
        let mut bytes = vec![0x9f, 0xeb, 1, 0];
        for word in [24, 0, lengths[0], lengths[0], lengths[1]] {
            bytes.extend(u32::to_le_bytes(word));
        }
        bytes.extend(types);
        bytes.extend(strings);
        bytes
    }

    const STRUCT: u32 = KIND_STRUCT << 24;
    const UNION: u32 = KIND_UNION << 24;

    #[test]
    fn fields_of_unnamed_structures_are_found() {
        // 1: int; 2: union { int b; }; 3: struct s { int a; union 2; int c:1; }
        let bytes = description(
            b"\0int\0s\0a\0b\0c\0",
            &[
                1,
                1 << 24,
                4,
                32, // int
                0,
                UNION | 1,
                4,
                9,
                1,
                0, // union
                5,
                1 << 31 | STRUCT | 3,
                12,
                7,
                1,
                0,
                0,
                2,
                32,
                11,
                1,
                (1 << 24) | 65,
            ],
        );
        let types = Types::parse(&bytes, &["s"], &[]).unwrap();
        assert_eq!(types.field("s", "a"), Some(0));
        assert_eq!(types.field("s", "b"), Some(32));
        assert_eq!(types.field("s", "c"), Some(65));
        assert_eq!(types.field("s", "d"), None);
        assert_eq!(types.field("t", "a"), None);
    }

    #[test]
    fn truncated_btf_gives_no_fields_and_no_panic() {
        let bytes = description(b"\0s\0a\0", &[1, STRUCT | 1, 4, 3, 1, 0]);
        assert!(Types::parse(&bytes, &["s"], &[]).is_some());
        for length in 0..bytes.len() {
            assert!(
                Types::parse(&bytes[..length], &["s"], &[])
                    .is_none_or(|types| types.field("s", "a").is_none()),
                "{length}"
            );
        }
        assert!(
            Types::parse(&description(b"\0", &[0, 31 << 24, 0]), &[], &[]).is_none(),
            "a type of an unknown kind was accepted"
        );
    }

    #[test]
    fn the_running_kernel_describes_its_sockets() {
        // Every kernel on which these tests run has BTF.
        let offsets = offsets(Path::new(VMLINUX)).unwrap();
        assert!(offsets.sk_err > 0 && offsets.srtt_us > offsets.sk_err, "{offsets:?}");
    }
}

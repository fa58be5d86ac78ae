//! The kernel's verifier on every program: it accepts them, at the default and at the maximum size
//! of the maps, and at no higher cost than recorded.
//!
//! The count comes from the verifier's log on every kernel. The program's properties (`struct
//! bpf_prog_info`) contain the same number, but only since Linux 5.16. The test loads the committed
//! object. It loads the object as the daemon does, but with separate code, because tests never link
//! the daemon.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use aya::maps::{Map, MapData};
use aya_obj::btf::{Btf, BtfFeatures, BtfKind};
use aya_obj::generated::{bpf_attach_type, bpf_cmd, bpf_prog_type};
use aya_obj::{Function, Object, ProgramSection};
use lb_common::abi::{self, ENTRIES_PER_CELL, map};
use lb_common::constants::{self, MOVE, OF_KERNEL, Placeholder, placeholder};
use stage::fixture::Fixture;
use stage::kernel::{FETCHING_ATOMICS, Version, print_line};
use stage::record::{Compared, Count, RECORDING, Record};
use stage::sys::{attributes, bpf};

static OBJECT: &[u8] = aya::include_bytes_aligned!("../../../lb-ebpf/object/socklb.o");

static HOST_OBJECT: &[u8] = aya::include_bytes_aligned!("../../../lb-ebpf/object/host.o");

/// The agents' object.
static RESPONDER_OBJECT: &[u8] = aya::include_bytes_aligned!("../../../lb-ebpf/object/responder.o");

static RECORD: &str = include_str!("../../vm/verifier.toml");

#[derive(Clone, Copy)]
struct Configuration {
    name: &'static str,
    /// The configured limits: schedule entries, slots, flow records.
    limits: [u32; 3],
    /// Whether the programs may scan backends, which `least-loaded` and limits require.
    scans: bool,
}

const DEFAULTS: [u32; 3] = [abi::SCHEDULE_ENTRIES, abi::SLOTS, abi::FLOW_RECORDS];

const CONFIGURATIONS: [Configuration; 3] = [
    // The configuration of most clients.
    Configuration { name: "without_scans", limits: DEFAULTS, scans: false },
    Configuration { name: "default", limits: DEFAULTS, scans: true },
    // The maximum of the section `[limits]`.
    Configuration { name: "maximum", limits: [4_194_304, abi::MAX_SLOTS, 4_194_304], scans: true },
];

#[test]
fn no_program_costs_the_verifier_much_more_than_recorded() {
    let record = Record::parse(RECORD).expect("tests/vm/verifier.toml is a record");
    let kernel = Version::running().to_string();
    let mut counts = Vec::new();
    let mut count = |configuration: &str, verified: Vec<(String, u64)>| {
        counts.extend(verified.into_iter().map(|(program, instructions)| Count {
            kernel: kernel.clone(),
            configuration: configuration.to_owned(),
            program,
            instructions,
        }));
    };
    for configuration in CONFIGURATIONS {
        count(configuration.name, verified_of_client(OBJECT, configuration));
    }
    count("host", verified(HOST_OBJECT, &[], &[PORT], NO_CASTS));
    count("responder", verified(RESPONDER_OBJECT, &[], &[PORT], NO_CASTS));
    if std::env::var_os(RECORDING).is_some() {
        for count in &counts {
            print_line(&count.to_string());
        }
        return;
    }
    let mut faults = Vec::new();
    for count in &counts {
        let result = match record.compare(count) {
            Compared::UnknownKernel => "(nothing is recorded for this kernel)".to_owned(),
            Compared::Fine(recorded) => format!("(recorded {recorded})"),
            Compared::Fewer(recorded) => format!("(recorded {recorded}: fewer)"),
            Compared::Unrecorded => {
                faults.push(format!("{count}: not recorded"));
                continue;
            }
            Compared::TooMany(recorded) => {
                faults.push(format!("{count}: this is more than a tenth above the recorded {recorded}"));
                continue;
            }
        };
        print_line(&format!("{count} {result}"));
    }
    faults.extend(record.stale(&kernel, &counts).iter().map(|what| format!("{what}: recorded, but absent")));
    assert!(
        faults.is_empty(),
        "{}\nif this is intended, run `cargo xtask test vm --record` and commit tests/vm/verifier.toml",
        faults.join("\n")
    );
}

/// The constant for the port in XDP programs, and its value in this test.
const PORT: (&str, u32) = ("PORT", 9467);

/// No kernel function for casts: for programs that cast nothing, and for kernels that lack the
/// function.
const NO_CASTS: u32 = 0;

/// Writes constants into the instructions that use them, and the number of the kernel's function
/// into calls of it. If the kernel lacks the function, the call becomes a move of zero.
fn put_in_place(function: &mut Function, globals: &[(&'static str, u32)], cast: u32) {
    let value = |name| globals.iter().find(|(global, _)| *global == name).map_or(0, |(_, value)| *value);
    for instruction in &mut function.instructions {
        let Some(placeholder) = placeholder(instruction.code, instruction.imm.cast_unsigned()) else {
            continue;
        };
        let (number, is_call) = match placeholder {
            Placeholder::Word(name) => (value(name), false),
            // These values are not known here. The verifier accepts any value as the time of a
            // tick.
            Placeholder::DoubleWord(_) => (1, false),
            Placeholder::Cast => (cast, true),
        };
        instruction.imm = number.cast_signed();
        if is_call && number == 0 {
            instruction.code = MOVE;
        } else if is_call {
            instruction.set_src_reg(OF_KERNEL);
        }
    }
}

/// The programs of `cargo xtask run --log-programs`.
#[test]
fn programs_with_log_lines_are_accepted() {
    let object = |name: &str| {
        let path = stage::program(&format!("log-programs/{name}.o"));
        std::fs::read(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()))
    };
    let of_client = verified_of_client(&object("socklb"), CONFIGURATIONS[1]);
    let others = ["host", "responder"].map(|name| verified(&object(name), &[], &[PORT], NO_CASTS));
    let all: Vec<(String, u64)> = of_client.into_iter().chain(others.into_iter().flatten()).collect();
    let shipped = verified(RESPONDER_OBJECT, &[], &[PORT], NO_CASTS);
    let with_lines =
        all.iter().find(|(name, _)| *name == shipped[0].0).expect("both objects have the program");
    assert!(
        with_lines.1 > shipped[0].1,
        "the verifier processes more with log lines: {with_lines:?}, {shipped:?}"
    );
}

/// Instructions of each program of client tasks that this kernel can load, with maps of these
/// sizes.
fn verified_of_client(
    object: &[u8],
    Configuration { limits: [schedule_entries, slots, flow_records], scans, .. }: Configuration,
) -> Vec<(String, u64)> {
    // The daemon's settings of its programs for this kernel.
    let daemon = Fixture::new().setup.daemon();
    let is_on = |name: &str| u32::from(daemon.features[name]);
    let offset = |name: &str| daemon.offsets[name];
    assert_eq!(
        is_on("socket_errors") * is_on("outcomes_at_release"),
        1,
        "root may read, and every kernel here has BTF"
    );
    let capacities = [
        (map::SCHEDULE, 2 * schedule_entries / ENTRIES_PER_CELL),
        (map::BACKENDS, slots),
        (map::COUNTS, slots),
        (map::FLOWS, flow_records),
        (map::FLOW_OVERFLOW, flow_records),
        (map::DATAGRAMS, flow_records),
    ];
    // Some kernels lack the function for casts.
    let of_casts = |name: &str| if is_on("kernel_casts") == 1 { offset(name) } else { 0 };
    let globals = [
        ("FLOW_MASK", flow_records - 1),
        ("HAS_SET_RETVAL", is_on("set_retval")),
        ("KNOWS_MPTCP", is_on("knows_mptcp")),
        ("FULL_ACCOUNTING", 1),
        ("SCANS", scans.into()),
        ("SK_ERR", offset("sk_err")),
        ("SK_ERR_SOFT", offset("sk_err_soft")),
        ("RELEASED_SK_ERR", offset("sk_err")),
        ("RELEASED_SK_ERR_SOFT", offset("sk_err_soft")),
        ("RELEASED_CALLBACKS", offset("bpf_sock_ops_cb_flags")),
        ("RELEASED_SRTT", offset("srtt_us")),
        ("RELEASED_RETRANSMITS", offset("total_retrans")),
        ("RELEASED_BYTES_RECEIVED", offset("bytes_received")),
        ("RELEASED_BYTES_SENT", offset("bytes_acked")),
        ("KERNEL_SOCKET", offset("sk_kern_sock")),
        ("KERNEL_SOCKET_MASK", offset("sk_kern_sock_mask")),
        ("SYN_RETRIES", offset("icsk_syn_retries")),
        ("TCP_SOCK", of_casts("tcp_sock")),
        ("EVENT", of_casts("bpf_sock_ops_kern")),
        ("EVENT_SOCKET", of_casts("sock_ops_sk")),
        ("SOCKET_COOKIE", of_casts("skc_cookie")),
        ("SOCKET_NAMESPACE", of_casts("skc_net")),
        ("NAMESPACE_COOKIE", of_casts("net_cookie")),
    ];
    verified(object, &capacities, &globals, of_casts("bpf_rdonly_cast"))
}

/// Instructions of each program of an object that this kernel can load, with maps of these sizes
/// and these globals.
fn verified(
    object: &[u8],
    capacities: &[(&str, u32)],
    globals: &[(&'static str, u32)],
    cast: u32,
) -> Vec<(String, u64)> {
    #[expect(clippy::disallowed_methods, reason = "tests do not link the product's loader")]
    let mut loader = aya::EbpfLoader::new();
    for (name, entries) in capacities {
        loader.map_max_entries(name, *entries);
    }
    for (name, value) in globals.iter().filter(|(name, _)| !constants::NAMES.contains(name)) {
        loader.override_global(name, value, true);
    }
    // This only creates the kernel's maps, against which the programs are verified. The programs
    // are loaded below without aya, because aya discards the log of an accepted program.
    let maps = loader.load(object).expect("create the maps");
    let fds: HashMap<&str, RawFd> =
        maps.maps().map(|(name, map)| (name, data(map).fd().as_fd().as_raw_fd())).collect();
    let mut object = Object::parse(object).expect("parse the object");
    let declared = object.maps.clone();
    let text = object.functions.keys().map(|(section, _)| *section).collect();
    let relocated = declared.iter().map(|(name, map)| (name.as_str(), fds[name.as_str()], map));
    object.relocate_maps(relocated, &text).expect("relocate maps");
    object.relocate_calls(&text).expect("relocate calls");
    object.functions.values_mut().for_each(|function| put_in_place(function, globals, cast));
    // The types show which functions are global: the verifier checks such a function once, for any
    // arguments, and not for each call.
    let types = load_types(&mut object);
    let mut programs: Vec<_> = object.programs.iter().collect();
    programs.sort_by_key(|(name, _)| *name);
    // If the kernel has no fetching atomics, the variants without them are loaded instead.
    let is_replaced = |name: &str| object.programs.contains_key(&format!("{name}_5_10"));
    programs.retain(|(name, _)| FETCHING_ATOMICS.is_here() || !is_replaced(name));
    programs
        .into_iter()
        .map(|(name, program)| {
            let function = &object.functions[&program.function_key()];
            let (log, _loaded) = load(&program.section, function, &types, &object.license)
                .unwrap_or_else(|(error, log)| panic!("{name} is refused: {error}\n{log}"));
            (name.clone(), processed(&log).unwrap_or_else(|| panic!("no count in the log: {log}")))
        })
        .collect()
}

/// The data of a map of any kind that the object has.
fn data(map: &Map) -> &MapData {
    match map {
        Map::Array(data)
        | Map::HashMap(data)
        | Map::LruHashMap(data)
        | Map::PerCpuArray(data)
        | Map::PerCpuHashMap(data)
        | Map::RingBuf(data)
        | Map::SkStorage(data) => data,
        other => panic!("the object has a map of a new kind: add the kind to this list: {other:?}"),
    }
}

/// Loads the description of the object's types, without parts that Linux 5.10 does not support.
fn load_types(object: &mut Object) -> OwnedFd {
    let features = BtfFeatures::new(true, true, true, true, false, false, false, false);
    let types = object
        .fixup_and_sanitize_btf(&features)
        .expect("the kernel accepts the types")
        .expect("the object has types");
    let bytes = types.to_bytes();
    let mut attr = attributes();
    // SAFETY: this member is the one that the command below reads; nothing else was written.
    let load = unsafe { &mut attr.__bindgen_anon_7 };
    load.btf = bytes.as_ptr() as u64;
    load.btf_size = u32::try_from(bytes.len()).expect("the description is small");
    // SAFETY: everything that the attributes point to outlives the call; the kernel has just made
    // the descriptor, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(bpf(bpf_cmd::BPF_BTF_LOAD, &mut attr).expect("load the types")) }
}

/// Loads a program and returns the verifier's log.
fn load(
    section: &ProgramSection,
    function: &Function,
    types: &OwnedFd,
    license: &std::ffi::CStr,
) -> Result<(String, OwnedFd), (std::io::Error, String)> {
    let (kind, attach_type): (bpf_prog_type, bpf_attach_type) = match section {
        ProgramSection::CgroupSockAddr { attach_type } => {
            (bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK_ADDR, (*attach_type).into())
        }
        ProgramSection::CgroupSock { attach_type } => {
            (bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK, (*attach_type).into())
        }
        ProgramSection::Xdp { .. } => (bpf_prog_type::BPF_PROG_TYPE_XDP, bpf_attach_type::BPF_XDP),
        ProgramSection::SockOps => {
            (bpf_prog_type::BPF_PROG_TYPE_SOCK_OPS, bpf_attach_type::BPF_CGROUP_SOCK_OPS)
        }
        // This program is an iterator over open files. The kernel's BTF identifies it.
        ProgramSection::Iter { .. } => {
            (bpf_prog_type::BPF_PROG_TYPE_TRACING, bpf_attach_type::BPF_TRACE_ITER)
        }
        other => panic!("the object has a program of a new kind: add the kind to this list: {other:?}"),
    };
    let mut log = vec![0u8; 1 << 16];
    let mut attr = attributes();
    // SAFETY: this member is the one that the command below reads; nothing else was written.
    let load = unsafe { &mut attr.__bindgen_anon_3 };
    load.prog_type = kind as u32;
    load.expected_attach_type = attach_type as u32;
    if let ProgramSection::Iter { .. } = section {
        #[expect(clippy::disallowed_methods, reason = "aya needs it for an iterator")]
        let types = Btf::from_sys_fs().expect("read the kernel's types");
        let function = types.id_by_type_name_kind("bpf_iter_task_file", BtfKind::Func);
        load.attach_btf_id = function.expect("the kernel has an iterator over open files (Linux 5.8)");
    }
    let instructions = &function.instructions;
    load.insns = instructions.as_ptr() as u64;
    load.insn_cnt = u32::try_from(instructions.len()).expect("the program is short");
    let functions = function.func_info.func_info_bytes();
    load.prog_btf_fd = u32::try_from(types.as_raw_fd()).expect("the descriptor is positive");
    load.func_info = functions.as_ptr() as u64;
    load.func_info_cnt = u32::try_from(function.func_info.len()).expect("the program has few functions");
    load.func_info_rec_size = u32::try_from(function.func_info_rec_size).expect("a record is small");
    load.license = license.as_ptr() as u64;
    load.log_buf = log.as_mut_ptr() as u64;
    load.log_size = u32::try_from(log.len()).expect("the log is small");
    load.log_level = BPF_LOG_STATS;
    // SAFETY: everything that the attributes point to outlives the call, and the kernel writes only
    // to the log.
    let loaded = unsafe { bpf(bpf_cmd::BPF_PROG_LOAD, &mut attr) };
    let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
    let log = String::from_utf8_lossy(&log[..end]).into_owned();
    match loaded {
        // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
        Ok(program) => Ok((log, unsafe { OwnedFd::from_raw_fd(program) })),
        Err(error) => Err((error, log)),
    }
}

/// Makes the verifier log only its summary (since Linux 5.2).
const BPF_LOG_STATS: u32 = 4;

/// Parses the line `processed 1234 insns (limit 1000000) ...`.
fn processed(log: &str) -> Option<u64> {
    let rest = log.lines().find_map(|line| line.strip_prefix("processed "))?;
    rest.split(' ').next()?.parse().ok()
}

//! Checks the stack use of kernel programs. Functions of a kernel program that call each other
//! share 512 bytes of stack. Linux 5.10 to 6.7 round the stack of each function up to a multiple of
//! 32 bytes, so these kernels reject objects that newer kernels accept. This test measures the
//! objects as these older kernels do, because the other tests usually run on a newer kernel.

use std::collections::{BTreeMap, BTreeSet};

use object::{Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget, SymbolKind};

/// `MAX_BPF_STACK`
const MOST: u32 = 512;

/// In Linux 5.10 to 6.7, `check_max_stack_depth` rounds the stack of each function up to a multiple
/// of this number of bytes.
const ROUNDED_TO: u32 = 32;

/// `BPF_JMP | BPF_CALL`
const CALL: u8 = 0x85;

/// A function: the size of its stack in bytes, and the names of the functions that it calls.
struct Function {
    depth: u32,
    callees: BTreeSet<String>,
}

/// The functions of an object, keyed by name.
fn functions(file: &[u8]) -> BTreeMap<String, Function> {
    let object = object::File::parse(file).expect("the file is an object");
    let code = object.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.size() > 0);
    let code: Vec<_> =
        code.map(|symbol| (symbol.section_index().expect("a section"), symbol.address(), symbol)).collect();
    let name =
        |at: &(_, u64, object::Symbol<'_, '_>)| at.2.name().expect("the function has a name").to_owned();
    let mut functions = BTreeMap::new();
    for one in &code {
        let (index, start, symbol) = one;
        let section = object.section_by_index(*index).expect("the section exists");
        let data = section
            .data_range(*start, symbol.size())
            .expect("the section can be read")
            .expect("the section contains the function");
        let called = section.relocations().filter_map(|(at, relocation)| {
            let at = usize::try_from(at.checked_sub(*start)?).ok()?;
            let call = data.get(at..at + 8).filter(|instruction| instruction[0] == CALL)?;
            let RelocationTarget::Symbol(target) = relocation.target() else {
                unreachable!("a call refers to a symbol")
            };
            let target = object.symbol_by_index(target).expect("the symbol exists");
            // If the symbol is that of the section and not of the function, the call contains the
            // position of the function in the section, in instructions relative to the next
            // instruction.
            let ahead = if target.kind() == SymbolKind::Section { (number(call) + 1) * 8 } else { 0 };
            let place = target.address() + u64::try_from(ahead).expect("the call leads into the section");
            let of = |one: &&(_, u64, _)| Some(one.0) == target.section_index() && one.1 == place;
            Some(name(code.iter().find(of).expect("the call leads to a function")))
        });
        functions.insert(name(one), Function { depth: depth(data), callees: called.collect() });
    }
    functions
}

/// The immediate number in an instruction.
fn number(instruction: &[u8]) -> i32 {
    i32::from_le_bytes([instruction[4], instruction[5], instruction[6], instruction[7]])
}

/// The size of a function's frame: the distance of the furthest byte to which the code refers
/// through the frame pointer or a copy of it. The code is examined in its order in memory and not
/// along its branches. This suffices because the compiler copies the frame pointer immediately
/// before it uses the copy.
fn depth(code: &[u8]) -> u32 {
    let mut frame: [Option<i32>; 11] = [None; 11];
    frame[10] = Some(0);
    let mut deepest = 0;
    for instruction in code.chunks_exact(8) {
        let (operation, registers) = (instruction[0], instruction[1]);
        let (to, from) = (usize::from(registers & 0xf), usize::from(registers >> 4));
        let offset = i32::from(i16::from_le_bytes([instruction[2], instruction[3]]));
        let place = |base: Option<i32>| base.map_or(0, |base| base + offset);
        // The class of the instruction, and its operation.
        match (operation & 0x07, operation) {
            // Loads from memory (class 1), and loads of a 64-bit immediate (class 0).
            (0 | 1, _) => {
                deepest = deepest.min(place(frame[from].filter(|_| operation & 0x07 == 1)));
                frame[to] = None;
            }
            // Stores.
            (2 | 3, _) => deepest = deepest.min(place(frame[to])),
            (7, 0xbf) => frame[to] = frame[from],
            (7, 0x07) => frame[to] = frame[to].map(|base| base + number(instruction)),
            (4 | 7, _) => frame[to] = None,
            (5, CALL) => {
                // An address that is passed to a callee is the lowest address of the memory that
                // the callee uses.
                deepest = frame[1..=5].iter().flatten().fold(deepest, |deepest, base| deepest.min(*base));
                frame[..=5].fill(None);
            }
            _ => {}
        }
    }
    deepest.unsigned_abs()
}

/// The stack bytes of the deepest chain of calls that begins with a function, and a description of
/// this chain.
fn deepest(functions: &BTreeMap<String, Function>, name: &str) -> (u32, String) {
    let function = functions.get(name).unwrap_or_else(|| panic!("there is no function {name}"));
    let callees = function.callees.iter().map(|callee| deepest(functions, callee));
    let (below, chain) = callees.max().unwrap_or_default();
    let own = function.depth.max(1).next_multiple_of(ROUNDED_TO);
    (own + below, format!("{name} {}, {chain}", function.depth))
}

#[test]
fn no_chain_of_calls_exceeds_the_stack_of_old_kernels() {
    for name in ["socklb", "host", "responder"] {
        let path = format!("{}/../../lb-ebpf/object/{name}.o", env!("CARGO_MANIFEST_DIR"));
        let functions = functions(&std::fs::read(&path).expect("the object is committed"));
        let programs: Vec<&String> = functions.keys().filter(|name| name.starts_with("socklb_")).collect();
        assert!(!programs.is_empty(), "{path}");
        for program in programs {
            let (stack, chain) = deepest(&functions, program);
            assert!(stack <= MOST, "{name}.o needs {stack} bytes of stack: {chain}");
        }
    }
}

#[test]
fn the_measured_stack_covers_every_reference() {
    let of = |instructions: &[[u8; 8]]| depth(instructions.as_flattened());
    let call = [CALL, 0, 0, 0, 1, 0, 0, 0];
    // r1 = 0; *(u64 *)(r10 - 8) = r1
    assert_eq!(of(&[[0xb7, 1, 0, 0, 0, 0, 0, 0], [0x7b, 0x1a, 0xf8, 0xff, 0, 0, 0, 0]]), 8);
    // r2 = r10; r2 += -40
    let copy = [[0xbf, 0xa2, 0, 0, 0, 0, 0, 0], [0x07, 2, 0, 0, 0xd8, 0xff, 0xff, 0xff]];
    assert_eq!(of(&copy), 0, "an unused address needs no stack");
    assert_eq!(of(&[copy[0], copy[1], call]), 40);
    // r3 = *(u32 *)(r2 - 8)
    assert_eq!(of(&[copy[0], copy[1], [0x61, 0x23, 0xf8, 0xff, 0, 0, 0, 0]]), 48);
    // r2 = 1
    assert_eq!(of(&[copy[0], copy[1], [0xb7, 2, 0, 0, 1, 0, 0, 0], call]), 0);
}

//! A call site: one position in the program that makes a system call, identified by the functions
//! that lead to it.

use std::collections::hash_map::DefaultHasher;
use std::fmt;
use std::hash::{Hash, Hasher};

use crate::filter;
use crate::stack::Frame;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Site {
    call: String,
    frames: Vec<Frame>,
}

/// A site's id on the command line. It is constant for all runs of one build.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Id(pub u64);

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl std::str::FromStr for Id {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u64::from_str_radix(text, 16).map(Self)
    }
}

/// A hash that does not change between runs.
pub fn hash(value: &impl Hash) -> u64 {
    // `DefaultHasher::new` has fixed keys.
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// The prefixes of our functions.
const OURS: [&str; 2] = ["lb_kernel::", "lb_user::"];
/// The prefix of functions that only call the kernel.
const CALLS_THE_KERNEL: &str = "lb_kernel::sys::";
/// If no function has a prefix of [`OURS`], this many innermost functions of the program identify
/// the site.
const OTHERS: usize = 8;
/// Functions that allocate memory. Chance determines which allocation requests memory from the
/// kernel, so all allocations are one site.
const ALLOCATES: [&str; 4] = ["__rdl_alloc", "__rdl_realloc", "__rdl_alloc_zeroed", "std::sys::alloc"];

impl Site {
    /// The site of a call, from its number and first argument, and the caller's stack. `None`
    /// before the program itself runs.
    pub fn of(number: i32, first: u64, stack: &[Frame]) -> Option<Self> {
        let begin = stack.iter().position(|frame| frame.is_program)?;
        let call = if number == i32::try_from(libc::SYS_bpf).expect("the number is small") {
            format!("bpf {}", command(first))
        } else {
            filter::name(number).to_owned()
        };
        let program = &stack[begin..];
        let ours = program.iter().position(|frame| OURS.iter().any(|ours| frame.function.contains(ours)));
        let until = ours.unwrap_or(OTHERS.min(program.len()));
        let is_allocator =
            program[..until].iter().any(|frame| ALLOCATES.iter().any(|name| frame.function.contains(name)));
        let frames: Vec<Frame> = if is_allocator {
            stack[..begin].to_vec()
        } else {
            let mut frames = stack[..begin + until].to_vec();
            let rest = program[until..].iter();
            frames
                .extend(rest.filter(|frame| OURS.iter().any(|ours| frame.function.contains(ours))).cloned());
            frames
        };
        Some(Self { call, frames })
    }

    /// The site's id on the command line.
    pub fn id(&self) -> Id {
        Id(hash(self))
    }

    /// The call and the functions that lead to it. The text depends only on their names.
    pub fn path(&self) -> String {
        let functions = self.frames.iter().map(|frame| &*frame.function);
        [&*self.call].into_iter().chain(functions).collect::<Vec<_>>().join(" < ")
    }

    /// The call, and the function with a prefix of [`OURS`] that makes it.
    pub fn summary(&self) -> String {
        let mut ours =
            self.frames.iter().filter(|frame| OURS.iter().any(|ours| frame.function.contains(ours)));
        let by = ours.find(|frame| !frame.function.contains(CALLS_THE_KERNEL)).or(self.frames.last());
        by.map_or_else(|| self.call.clone(), |frame| format!("{} by {}", self.call, frame.function))
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", self.call, self.id())?;
        for Frame { function, offset, .. } in &self.frames {
            write!(f, "\n      {function}+{offset:#x}")?;
        }
        Ok(())
    }
}

/// The command of bpf(2), `enum bpf_cmd`.
fn command(number: u64) -> String {
    let names = [
        (0, "MAP_CREATE"),
        (1, "MAP_LOOKUP_ELEM"),
        (2, "MAP_UPDATE_ELEM"),
        (3, "MAP_DELETE_ELEM"),
        (4, "MAP_GET_NEXT_KEY"),
        (5, "PROG_LOAD"),
        (6, "OBJ_PIN"),
        (7, "OBJ_GET"),
        (10, "PROG_TEST_RUN"),
        (13, "PROG_GET_FD_BY_ID"),
        (15, "OBJ_GET_INFO_BY_FD"),
        (16, "PROG_QUERY"),
        (18, "BTF_LOAD"),
        (24, "MAP_LOOKUP_BATCH"),
        (26, "MAP_UPDATE_BATCH"),
        (28, "LINK_CREATE"),
        (29, "LINK_UPDATE"),
        (33, "ITER_CREATE"),
        (34, "LINK_DETACH"),
    ];
    let name = names.iter().find(|(known, _)| *known == number);
    name.map_or_else(|| number.to_string(), |(_, name)| (*name).to_owned())
}

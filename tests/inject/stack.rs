//! Finds the code that makes a system call: walks the stack of a thread of another process that
//! waits in the call, with the compiler's tables for unwinding. The program needs no special build.

use std::collections::HashMap;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use framehop::x86_64::{CacheX86_64, UnwindRegsX86_64, UnwinderX86_64};
use framehop::{MayAllocateDuringUnwind, Module, Unwinder};

use crate::symbols::{Bytes, Code, Library};

/// A position in the code of a thread.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frame {
    /// Whether the code belongs to the program itself, and not to a library.
    pub is_program: bool,
    /// The function's name.
    pub function: String,
    /// Offset into the function.
    pub offset: u64,
}

/// A file that a process has mapped.
struct Mapped {
    range: Range<u64>,
    path: PathBuf,
    code: Option<Arc<Code>>,
}

/// The code of one process.
pub struct Stacks {
    pid: u32,
    program: PathBuf,
    mapped: Vec<Mapped>,
    unwinder: UnwinderX86_64<Bytes, MayAllocateDuringUnwind>,
    cache: CacheX86_64<MayAllocateDuringUnwind>,
}

const PAGE: usize = 4096;
/// The maximum number of frames of a stack. Outer frames beyond it are left out.
const DEPTH: usize = 160;

impl Stacks {
    pub fn of(pid: u32) -> Self {
        let program = fs::read_link(format!("/proc/{pid}/exe")).expect("the process is alive");
        Self { pid, program, mapped: Vec::new(), unwinder: UnwinderX86_64::new(), cache: CacheX86_64::new() }
    }

    /// The stack of a thread of the process, innermost call first. `None` if the thread has ended.
    pub fn walk(&mut self, thread: u32, library: &mut Library) -> Option<Vec<Frame>> {
        let (stack, code) = registers(thread)?;
        let memory = File::open(format!("/proc/{thread}/mem")).ok()?;
        let mut pages: HashMap<u64, Option<Box<[u8; PAGE]>>> = HashMap::new();
        let mut read = |address: u64| {
            let page = address & !(PAGE as u64 - 1);
            let bytes = pages.entry(page).or_insert_with(|| {
                let mut bytes = Box::new([0; PAGE]);
                memory.read_exact_at(bytes.as_mut_slice(), page).ok().map(|()| bytes)
            });
            let at = usize::try_from(address - page).map_err(drop)?;
            let word = bytes.as_ref().and_then(|bytes| bytes.get(at..at + 8)).ok_or(())?;
            Ok(u64::from_le_bytes(word.try_into().expect("a word has eight bytes")))
        };
        if self.file(code).is_none() {
            self.map(library);
        }
        // The kernel does not report the frame pointer of a waiting thread. The walk needs the
        // frame pointer only for functions with a frame of variable size.
        let registers = UnwindRegsX86_64::new(code, stack, 0);
        let mut frames = self.unwinder.iter_frames(code, registers, &mut self.cache, &mut read);
        let mut addresses = Vec::new();
        while addresses.len() < DEPTH
            && let Ok(Some(frame)) = frames.next()
        {
            addresses.push(frame.address_for_lookup());
        }
        Some(addresses.into_iter().filter_map(|address| self.frame(address)).collect())
    }

    fn file(&self, address: u64) -> Option<&Mapped> {
        self.mapped.iter().find(|file| file.range.contains(&address))
    }

    fn frame(&self, address: u64) -> Option<Frame> {
        let Mapped { range, path, code } = self.file(address)?;
        let (function, offset) = code.as_ref()?.function(address - range.start)?;
        Some(Frame { is_program: *path == self.program, function: function.to_owned(), offset })
    }

    /// Reads the mappings of the process. Libraries appear one after the other while the process
    /// starts.
    fn map(&mut self, library: &mut Library) {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid)).unwrap_or_default();
        let mut files: Vec<(PathBuf, Range<u64>)> = Vec::new();
        for line in maps.lines() {
            let Some((range, path)) = mapped_file(line) else { continue };
            match files.last_mut() {
                Some((last, whole)) if *last == path => whole.end = range.end,
                _ => files.push((path, range)),
            }
        }
        for (path, range) in files {
            if self.mapped.iter().any(|known| known.range == range && known.path == path) {
                continue;
            }
            let code = library.of(&path);
            if let Some(code) = &code {
                let name = path.to_string_lossy().into_owned();
                self.unwinder.remove_module(range.start);
                self.unwinder.add_module(Module::new(name, range.clone(), range.start, code.sections()));
            }
            self.mapped.retain(|known| known.range.start != range.start);
            self.mapped.push(Mapped { range, path, code });
        }
    }
}

/// The file in a line of `/proc/PID/maps`, and the addresses at which it is mapped.
fn mapped_file(line: &str) -> Option<(Range<u64>, PathBuf)> {
    let (range, rest) = line.split_once(' ')?;
    let (begin, end) = range.split_once('-')?;
    let path = &rest[rest.find('/')?..];
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some((number(begin)?..number(end)?, Path::new(path).to_owned()))
}

/// Stack pointer and instruction pointer of a thread that waits in a system call.
fn registers(thread: u32) -> Option<(u64, u64)> {
    loop {
        let text = fs::read_to_string(format!("/proc/{thread}/syscall")).ok()?;
        if text.starts_with("running") {
            // The thread has sent its notification and is about to wait for the answer.
            std::thread::yield_now();
            continue;
        }
        let mut numbers = text.split_whitespace().rev().map(|word| {
            u64::from_str_radix(word.trim_start_matches("0x"), 16).expect("the word is hexadecimal")
        });
        let (code, stack) = (numbers.next()?, numbers.next()?);
        return Some((stack, code));
    }
}

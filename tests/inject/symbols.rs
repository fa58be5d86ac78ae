//! The description of code in an executable file: the function at an address, and the tables for
//! walking a stack. Each file is read once.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use framehop::ExplicitModuleSectionInfo;
use object::{Object, ObjectSection, ObjectSegment, ObjectSymbol, SymbolKind};

/// A section's bytes, shared by all walks of stacks.
pub type Bytes = Arc<[u8]>;

pub struct Code {
    /// The address at which the file is linked.
    base: u64,
    /// The names of functions, keyed by their first address.
    functions: BTreeMap<u64, String>,
    frames: (Range<u64>, Bytes),
    index: (Range<u64>, Bytes),
    text: Range<u64>,
}

/// All files that were read.
#[derive(Default)]
pub struct Library(BTreeMap<PathBuf, Option<Arc<Code>>>);

impl Library {
    /// Reads a file; `None` if its code cannot be described.
    pub fn of(&mut self, path: &Path) -> Option<Arc<Code>> {
        self.0.entry(path.to_owned()).or_insert_with(|| Code::read(path).map(Arc::new)).clone()
    }
}

impl Code {
    fn read(path: &Path) -> Option<Self> {
        let bytes = fs::read(path).ok()?;
        let file = object::File::parse(bytes.as_slice()).ok()?;
        let section = |name| {
            let section = file.section_by_name(name)?;
            let range = section.address()..section.address() + section.size();
            Some((range, Bytes::from(section.data().ok()?)))
        };
        let functions = file.symbols().chain(file.dynamic_symbols());
        let functions = functions.filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.address() != 0);
        let functions = functions.filter_map(|symbol| {
            let name = rustc_demangle::demangle(symbol.name().ok()?);
            // The form `{:#}` omits the hash that distinguishes builds.
            Some((symbol.address(), format!("{name:#}")))
        });
        const PAGE: u64 = 4096;
        Some(Self {
            base: file.segments().map(|segment| segment.address()).min()? / PAGE * PAGE,
            functions: functions.collect(),
            frames: section(".eh_frame")?,
            index: section(".eh_frame_hdr")?,
            text: section(".text")?.0,
        })
    }

    /// The sections that the stack walker needs.
    pub fn sections(&self) -> ExplicitModuleSectionInfo<Bytes> {
        ExplicitModuleSectionInfo {
            base_svma: self.base,
            text_svma: Some(self.text.clone()),
            eh_frame_svma: Some(self.frames.0.clone()),
            eh_frame: Some(Arc::clone(&self.frames.1)),
            eh_frame_hdr_svma: Some(self.index.0.clone()),
            eh_frame_hdr: Some(Arc::clone(&self.index.1)),
            ..Default::default()
        }
    }

    /// The function that is `offset` bytes into the file's memory, and the offset within the
    /// function.
    pub fn function(&self, offset: u64) -> Option<(&str, u64)> {
        let address = self.base + offset;
        let (begin, name) = self.functions.range(..=address).next_back()?;
        Some((name, address - begin))
    }
}

//! Converts YAML to JSON, so that one reader handles both formats. Also records the source position
//! of each part.
//!
//! saphyr-parser reads the text: it yields events with positions, does not recurse, is maintained,
//! and adds only one crate to the dependencies. (serde_yaml and its forks are archived or have no
//! positions; serde-saphyr yields values but no events.) YAML that JSON cannot express is refused:
//! tags, keys that are not scalars, merge keys, a second document. An alias repeats the value that
//! it names, up to a maximum total length.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::ops::Range;

use lb_document::diagnostic::{DiagnosticCollector, quote};
use saphyr_parser::{Event, Parser, ScalarStyle, Span, Tag};
use serde_json::Number;

use super::MAX_FILE_BYTES;

/// The maximum nesting of lists and mappings. An Envoy assignment has ten levels.
const MAX_DEPTH: usize = 64;

/// The maximum length of the JSON in bytes. Without aliases, the JSON is about as long as the YAML.
const MAX_BYTES: usize = 2 * MAX_FILE_BYTES;

/// A value or a key: the offset at which it starts in the JSON, and its position in the source.
#[derive(Clone, Debug)]
pub struct SourceMapping {
    pub start: u32,
    pub origin: Range<u32>,
}

/// A YAML text as JSON on one line, with its values and keys in the order of the text.
#[derive(Default)]
pub struct Json {
    pub text: String,
    pub places: Vec<SourceMapping>,
}

/// The maximum number of commas and brackets. The parser queues the tokens of a bracketed value
/// until the value ends, and needs 800 bytes for each comma or bracket. A list of 16,384 targets,
/// each with its own brackets, has 32,768 brackets.
const MAX_IN_BRACKETS: usize = 1 << 17;

/// Parses a text and reports its faults.
pub fn read(text: &str, report: &DiagnosticCollector<'_>) -> Option<Json> {
    let mut signs = text.bytes().enumerate().filter(|(_, byte)| b",[]{}?".contains(byte));
    if let Some((at, _)) = signs.nth(MAX_IN_BRACKETS) {
        let message = format!("the file has more than {MAX_IN_BRACKETS} commas and brackets");
        report.add_syntax(at..at + 1, message, Some("write it as JSON, or as block YAML".to_owned()));
        return None;
    }
    let offsets = ByteOffsets::of(text);
    let mut writer =
        YamlToJson { anchors: Vec::new(), open: Vec::new(), is_complete: false, json: Json::default() };
    let mut parser = Parser::new_from_str(text);
    while let Some(event) = parser.next_event() {
        let written = match event {
            Ok((event, span)) => {
                let at = offsets.range(span);
                writer.write(event, at.clone()).map_err(|(message, help)| (at, message, help))
            }
            Err(error) => {
                let at = offsets.byte(error.marker().index());
                Err((at..at + 1, error.info().to_owned(), None))
            }
        };
        if let Err((at, message, help)) = written {
            report.add_syntax(at, message, help.map(str::to_owned));
            return None;
        }
    }
    Some(writer.json)
}

/// Converts character offsets, which the parser returns, to byte offsets for reports.
struct ByteOffsets(Option<Vec<u32>>, usize);

impl ByteOffsets {
    fn of(text: &str) -> Self {
        let offsets = || text.char_indices().map(|(at, _)| u32::try_from(at).unwrap_or(u32::MAX)).collect();
        Self((!text.is_ascii()).then(offsets), text.len())
    }

    fn byte(&self, index: usize) -> usize {
        let byte = match &self.0 {
            Some(offsets) => offsets.get(index).map_or(self.1, |byte| *byte as usize),
            None => index,
        };
        byte.min(self.1)
    }

    fn range(&self, span: Span) -> Range<usize> {
        let start = self.byte(span.start.index());
        start..self.byte(span.end.index()).max(start)
    }
}

/// An unfinished list or mapping.
enum OpenCollection {
    List {
        place: usize,
        anchor: usize,
        is_empty: bool,
    },
    /// `keys` are the keys so far. `is_value`: whether a value comes next.
    Mapping {
        place: usize,
        anchor: usize,
        keys: BTreeSet<String>,
        is_value: bool,
    },
}

/// The value that an anchor names: its range in the list of positions, and its range in the JSON.
type Anchor = (Range<usize>, Range<usize>);

struct YamlToJson {
    /// Indexed by the parser's number of the anchor. The numbers begin at 1.
    anchors: Vec<Option<Anchor>>,
    open: Vec<OpenCollection>,
    /// Whether the document has ended.
    is_complete: bool,
    json: Json,
}

/// The description of a fault, and the correction.
type Wrong = (String, Option<&'static str>);

impl YamlToJson {
    fn write(&mut self, event: Event<'_>, at: Range<usize>) -> Result<(), Wrong> {
        let too_long = || {
            let message = format!("the file is longer than {MAX_BYTES} bytes once its aliases are expanded");
            (message, Some("write fewer aliases"))
        };
        if self.json.text.len() > MAX_BYTES {
            return Err(too_long());
        }
        match event {
            Event::Nothing | Event::StreamStart | Event::StreamEnd => Ok(()),
            Event::DocumentStart(_) if self.is_complete => {
                Err(("a second document begins here".to_owned(), Some("write one list")))
            }
            Event::DocumentStart(_) => Ok(()),
            Event::DocumentEnd => {
                self.is_complete = true;
                Ok(())
            }
            Event::Scalar(text, style, anchor, tag) => {
                let is_text = style != ScalarStyle::Plain || is_tagged(tag.as_deref())?;
                self.scalar(&text, is_text, anchor, at)
            }
            Event::SequenceStart(anchor, tag) => {
                refuse(tag.as_deref())?;
                let place = self.begin(&at, '[')?;
                self.open(OpenCollection::List { place, anchor, is_empty: true })
            }
            Event::MappingStart(anchor, tag) => {
                refuse(tag.as_deref())?;
                let place = self.begin(&at, '{')?;
                self.open(OpenCollection::Mapping { place, anchor, keys: BTreeSet::new(), is_value: false })
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(open) = self.open.pop() else { return Ok(()) };
                let (place, anchor, bracket) = match open {
                    OpenCollection::List { place, anchor, .. } => (place, anchor, ']'),
                    OpenCollection::Mapping { place, anchor, .. } => (place, anchor, '}'),
                };
                self.json.text.push(bracket);
                let origin = &mut self.json.places[place].origin;
                origin.end = short(at.end).max(origin.start);
                self.name(anchor, place);
                Ok(())
            }
            Event::Alias(anchor) => {
                let named = self.anchors.get(anchor).cloned().flatten();
                let Some((places, text)) = named else {
                    return Err(("an alias is inside the value that it names".to_owned(), None));
                };
                // This check also bounds the JSON of a short text in which aliases repeat aliases.
                if self.json.text.len() + text.len() > MAX_BYTES {
                    return Err(too_long());
                }
                let start = self.separate()?;
                for place in places {
                    let named = self.json.places[place].start as usize;
                    self.json.place(start + named - text.start, &at);
                }
                self.json.text.extend_from_within(text);
                Ok(())
            }
        }
    }

    /// Writes the separator before a value, and returns the offset at which the value begins.
    fn separate(&mut self) -> Result<usize, Wrong> {
        match self.open.last_mut() {
            Some(OpenCollection::List { is_empty, .. }) => {
                let is_first = std::mem::replace(is_empty, false);
                if !is_first {
                    self.json.text.push(',');
                }
            }
            Some(OpenCollection::Mapping { is_value, .. }) => {
                let is_key = !std::mem::replace(is_value, false);
                if is_key {
                    return Err(("a key must be a scalar".to_owned(), Some("write a name")));
                }
            }
            None => {}
        }
        Ok(self.json.text.len())
    }

    fn begin(&mut self, at: &Range<usize>, bracket: char) -> Result<usize, Wrong> {
        let start = self.separate()?;
        self.json.place(start, at);
        self.json.text.push(bracket);
        Ok(self.json.places.len() - 1)
    }

    fn open(&mut self, open: OpenCollection) -> Result<(), Wrong> {
        self.open.push(open);
        if self.open.len() > MAX_DEPTH {
            return Err((format!("more than {MAX_DEPTH} lists and mappings are nested"), None));
        }
        Ok(())
    }

    fn scalar(&mut self, text: &str, is_text: bool, anchor: usize, at: Range<usize>) -> Result<(), Wrong> {
        if let Some(OpenCollection::Mapping { keys, is_value, .. }) = self.open.last_mut()
            && !*is_value
        {
            if text == "<<" && !is_text {
                return Err(("merge keys (<<) are not supported".to_owned(), Some("write the keys out")));
            }
            if !keys.insert(text.to_owned()) {
                return Err((format!("key {} appears twice", quote(text)), None));
            }
            *is_value = true;
            if keys.len() > 1 {
                self.json.text.push(',');
            }
            let start = self.json.text.len();
            self.json.place(start, &at);
            self.json.push_string(text);
            self.name(anchor, self.json.places.len() - 1);
            self.json.text.push(':');
            return Ok(());
        }
        let start = self.separate()?;
        self.json.place(start, &at);
        match text {
            _ if is_text => self.json.push_string(text),
            "" | "~" | "null" | "Null" | "NULL" => self.json.text.push_str("null"),
            // Other spellings of truth values are read as text, so that a label has the text as
            // written. Outside of labels, no format uses these spellings.
            "true" | "false" => self.json.text.push_str(text),
            // Numbers that only YAML has, such as 0x10 or .5, are read as text.
            _ if text.parse::<Number>().is_ok() => self.json.text.push_str(text),
            _ => self.json.push_string(text),
        }
        self.name(anchor, self.json.places.len() - 1);
        Ok(())
    }

    /// Stores the value that an anchor names: everything that was written since the value began.
    fn name(&mut self, anchor: usize, place: usize) {
        if anchor == 0 {
            return;
        }
        if self.anchors.len() <= anchor {
            self.anchors.resize(anchor + 1, None);
        }
        let text = self.json.places[place].start as usize..self.json.text.len();
        self.anchors[anchor] = Some((place..self.json.places.len(), text));
    }
}

impl Json {
    fn place(&mut self, start: usize, at: &Range<usize>) {
        self.places.push(SourceMapping { start: short(start), origin: short(at.start)..short(at.end) });
    }

    fn push_string(&mut self, text: &str) {
        // Writing to a string cannot fail.
        let _ = write!(self.text, "{}", serde_json::Value::from(text));
    }
}

/// Converts an offset to 32 bits, which is possible because the length of the text is limited.
fn short(offset: usize) -> u32 {
    u32::try_from(offset).unwrap_or(u32::MAX)
}

/// Returns whether a tag marks a scalar as text.
fn is_tagged(tag: Option<&Tag>) -> Result<bool, Wrong> {
    match tag {
        None => Ok(false),
        Some(tag) if tag.is_yaml_core_schema() && tag.suffix == "str" => Ok(true),
        // The tag `!` marks a scalar as text.
        Some(tag) if tag.handle.is_empty() && tag.suffix == "!" => Ok(true),
        Some(tag) => refuse(Some(tag)).map(|()| false),
    }
}

fn refuse(tag: Option<&Tag>) -> Result<(), Wrong> {
    match tag {
        None => Ok(()),
        Some(tag) => {
            Err((format!("tag {} is not supported", quote(&tag.to_string())), Some("leave the tag out")))
        }
    }
}

//! Parses the answers of DNS servers into records, an empty answer, or the reason why the answer
//! cannot be used. This file performs no I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use domain::base::iana::{Class, Opcode, Rcode, Rtype};
use domain::base::record::ParsedRecord;
use domain::base::wire::ParseError;
use domain::base::{Message, MessageBuilder, Name, ParsedName, ToName, Ttl};
use domain::net::client::request::RequestMessage;
use domain::rdata;

use crate::Failure;

/// The longest chain of aliases (CNAME) that an answer may contain.
const MAX_ALIASES: usize = 16;

/// The longest TTL; a longer TTL is treated as 0 (RFC 2181, section 8).
const MAX_TTL: u32 = i32::MAX as u32;

/// A DNS question: the name and the type of the requested records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    name: Name<Vec<u8>>,
    rtype: Rtype,
}

impl Question {
    /// A question for SRV records. All names are absolute, with or without a dot at their end.
    ///
    /// # Errors
    /// If the name is not a domain name.
    pub fn srv(name: &str) -> Result<Self, Failure> {
        Self::new(name, Rtype::SRV)
    }

    /// A question for A records, or with `is_ipv6` for AAAA records.
    ///
    /// # Errors
    /// If the name is not a domain name.
    pub fn addresses(name: &str, is_ipv6: bool) -> Result<Self, Failure> {
        Self::new(name, if is_ipv6 { Rtype::AAAA } else { Rtype::A })
    }

    fn new(name: &str, rtype: Rtype) -> Result<Self, Failure> {
        match Name::vec_from_str(name) {
            Ok(name) => Ok(Self { name, rtype }),
            Err(error) => Err(Failure::Malformed(format!("dns {name:?}: not a domain name: {error}"))),
        }
    }

    /// The question as a message that requests recursion (RD).
    pub fn request(&self) -> RequestMessage<Vec<u8>> {
        let mut message = MessageBuilder::new_vec();
        message.header_mut().set_rd(true);
        let mut message = message.question();
        message.push((&self.name, self.rtype)).expect("a vector has room for one question");
        RequestMessage::new(message).expect("the question is not a zone transfer")
    }
}

impl std::fmt::Display for Question {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.name, self.rtype)
    }
}

/// The answer of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup<T> {
    Records(RecordSet<T>),
    /// The name does not exist, or has no records of the requested type. `why` states the reason.
    Empty {
        why: String,
    },
}

/// The records that were requested: at least one, in no particular order. A server may repeat a
/// record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordSet<T> {
    pub records: Vec<T>,
    /// The shortest TTL of the records, and of the aliases that lead to them.
    pub ttl: Duration,
    /// The serial number of the zone, if the answer contains it.
    pub serial: Option<u32>,
    /// With SRV records: the addresses in the additional section of the answer, keyed by the name
    /// in lower case. For each name and family, a server adds all addresses or none.
    pub additional: BTreeMap<String, Additional>,
}

/// Addresses of one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Additional {
    pub addresses: BTreeSet<IpAddr>,
    /// The shortest TTL of the addresses.
    pub ttl: Duration,
}

/// An SRV record (RFC 2782).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Srv {
    /// Clients use the lowest value with a target that they can reach.
    pub priority: u16,
    pub weight: u16,
    pub port: u16,
    /// The host's name in lower case, without a dot at its end. If the target is `.`, the service
    /// does not exist.
    pub target: String,
}

/// A type of record data that can be requested.
pub trait RecordData: Sized {
    /// Reads a record; `None` if it has another type.
    fn read(record: &Parsed<'_>, rtype: Rtype) -> Result<Option<Self>, ParseError>;
}

type Parsed<'m> = ParsedRecord<'m, [u8]>;
type MessageName<'m> = ParsedName<&'m [u8]>;

impl RecordData for Srv {
    fn read(record: &Parsed<'_>, _: Rtype) -> Result<Option<Self>, ParseError> {
        let record = record.to_record::<rdata::Srv<MessageName<'_>>>()?;
        Ok(record.map(|record| {
            let srv = record.data();
            Self {
                priority: srv.priority(),
                weight: srv.weight(),
                port: srv.port(),
                target: text(*srv.target()),
            }
        }))
    }
}

impl RecordData for IpAddr {
    fn read(record: &Parsed<'_>, rtype: Rtype) -> Result<Option<Self>, ParseError> {
        if rtype == Rtype::A {
            Ok(record.to_record::<rdata::A>()?.map(|record| record.data().addr().into()))
        } else {
            Ok(record.to_record::<rdata::Aaaa>()?.map(|record| record.data().addr().into()))
        }
    }
}

/// Reads the answer to a question.
///
/// # Errors
/// If the message is not a usable answer: the server refuses, the message is incomplete or has the
/// flag TC, or it answers another question. The text of the failure names neither the server nor
/// the question.
pub fn read<T: RecordData>(message: &[u8], question: &Question) -> Result<Lookup<T>, Failure> {
    let message =
        Message::from_slice(message).map_err(|_| malformed("the answer is shorter than a header"))?;
    let header = message.header();
    if !header.qr() || header.opcode() != Opcode::QUERY {
        return Err(malformed("the message is not an answer"));
    }
    match header.rcode() {
        Rcode::NOERROR | Rcode::NXDOMAIN => {}
        // An answer with an error code need not repeat the question, so the code is read first.
        Rcode::SERVFAIL => return Err(Failure::Unreachable("the server answers SERVFAIL".to_owned())),
        rcode => return Err(Failure::Refused(format!("the server answers {rcode}"))),
    }
    let queried = message.sole_question()?;
    if queried.qname() != &question.name || queried.qtype() != question.rtype || queried.qclass() != Class::IN
    {
        return Err(malformed("the answer is to another question"));
    }
    if header.tc() {
        return Err(malformed("the answer is truncated"));
    }

    // All records are parsed, even unused ones, so that a truncated message is detected.
    let (_, answer, authority, additional) = message.sections()?;
    let is_ours = |record: &Parsed<'_>| record.class() == Class::IN;
    let (mut aliases, mut answers) = (Vec::new(), Vec::new());
    for record in answer {
        let record = record?;
        if let Some(alias) = record.to_record::<rdata::Cname<MessageName<'_>>>()? {
            aliases.push((record.owner(), *alias.data().cname(), duration(record.ttl())));
        } else if is_ours(&record) && record.rtype() == question.rtype {
            answers.push(record);
        }
    }
    let (mut has_ns, mut serial) = (false, None);
    for record in authority {
        let record = record?;
        has_ns |= record.rtype() == Rtype::NS;
        if let Some(soa) = record.to_record::<rdata::Soa<MessageName<'_>>>()? {
            serial = Some(soa.data().serial().into_int());
        }
    }
    let mut added: BTreeMap<String, Additional> = BTreeMap::new();
    for record in additional {
        let record = record?;
        let is_wanted = question.rtype == Rtype::SRV && is_ours(&record);
        if let Some(address) = IpAddr::read(&record, record.rtype())?.filter(|_| is_wanted) {
            let ttl = duration(record.ttl());
            let name = added.entry(text(record.owner()));
            let name = name.or_insert_with(|| Additional { addresses: BTreeSet::new(), ttl });
            name.addresses.insert(address);
            name.ttl = name.ttl.min(ttl);
        }
    }

    let (name, mut ttl) = follow(&question.name, &aliases)?;
    let mut records = Vec::new();
    for record in answers {
        if record.owner().name_eq(&name)
            && let Some(found) = T::read(&record, question.rtype)?
        {
            records.push(found);
            ttl = ttl.min(duration(record.ttl()));
        }
    }
    let alias = if name == question.name { String::new() } else { format!(" at {name}, its alias") };
    match (header.rcode() == Rcode::NXDOMAIN, records.is_empty()) {
        (false, false) => Ok(Lookup::Records(RecordSet { records, ttl, serial, additional: added })),
        (true, false) => Err(malformed("the answer has the code NXDOMAIN, but it has records")),
        (true, true) => Ok(Lookup::Empty { why: format!("NXDOMAIN{alias}") }),
        // RFC 2308: an answer without records contains a SOA record, or no NS record. NS records
        // alone are a referral.
        (false, true) if has_ns && serial.is_none() && !header.aa() => {
            let what = "the server refers to other name servers instead of answering";
            Err(Failure::Refused(what.to_owned()))
        }
        (false, true) => Ok(Lookup::Empty { why: format!("no {} records{alias}", question.rtype) }),
    }
}

/// Follows the aliases of `name`. Returns the last name of the chain, and the shortest TTL of the
/// aliases.
fn follow(
    name: &Name<Vec<u8>>,
    aliases: &[(MessageName<'_>, MessageName<'_>, Duration)],
) -> Result<(Name<Vec<u8>>, Duration), Failure> {
    let (mut name, mut shortest) = (name.clone(), Duration::MAX);
    for _ in 0..=MAX_ALIASES {
        let Some((_, target, ttl)) = aliases.iter().find(|(owner, ..)| owner.name_eq(&name)) else {
            return Ok((name, shortest));
        };
        name = target.to_vec();
        shortest = shortest.min(*ttl);
    }
    Err(Failure::Malformed(format!("the aliases (CNAME) form a loop, or there are more than {MAX_ALIASES}")))
}

/// A name in lower case. Characters that could control a terminal are escaped.
fn text(name: MessageName<'_>) -> String {
    if name.is_root() { ".".to_owned() } else { name.to_string().to_ascii_lowercase() }
}

fn duration(ttl: Ttl) -> Duration {
    let seconds = ttl.as_secs();
    Duration::from_secs(if seconds > MAX_TTL { 0 } else { seconds.into() })
}

fn malformed(what: &str) -> Failure {
    Failure::Malformed(what.to_owned())
}

impl From<ParseError> for Failure {
    fn from(error: ParseError) -> Self {
        Self::Malformed(format!("the answer cannot be parsed: {error}"))
    }
}

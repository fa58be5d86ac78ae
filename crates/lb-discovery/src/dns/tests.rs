//! Tests that read DNS messages as lists. The tests in `server` query test servers, many of them
//! hostile.

use std::time::Duration;

use domain::base::iana::{Class, Opcode, Rcode, Rtype};
use domain::base::{Message, MessageBuilder, Name, Serial, Ttl};
use domain::rdata;
use lb_config::discovery::{DnsOrigin, DnsSettings, DnsTransport};

use super::*;

mod server;

const SERVICE: &str = "_users._tcp.example.com";
const HOST: &str = "users.example.com";

fn settings(servers: &[SocketAddr], transport: DnsTransport) -> DnsSettings {
    let (min_ttl, max_ttl) = (Duration::from_secs(5), Duration::from_mins(5));
    DnsSettings { servers: servers.to_vec(), transport, min_ttl, max_ttl }
}

fn srv() -> DnsOrigin {
    DnsOrigin { name: SERVICE.to_owned(), port: None, settings: settings(&[], DnsTransport::Tcp) }
}

fn host() -> DnsOrigin {
    DnsOrigin { name: HOST.to_owned(), port: Some(8080), ..srv() }
}

fn name(text: &str) -> Name<Vec<u8>> {
    Name::vec_from_str(text).unwrap()
}

/// An answer. A record is written as in a zone file: its name, TTL, type and data.
#[derive(Clone)]
struct Reply {
    id: u16,
    rcode: Rcode,
    question: (String, Rtype),
    is_truncated: bool,
    is_authoritative: bool,
    answer: Vec<String>,
    authority: Vec<String>,
    additional: Vec<String>,
}

impl Reply {
    fn to(name: &str, rtype: Rtype, answer: &[&str]) -> Self {
        Self {
            id: 0,
            rcode: Rcode::NOERROR,
            question: (name.to_owned(), rtype),
            is_truncated: false,
            is_authoritative: true,
            answer: answer.iter().map(|&record| record.to_owned()).collect(),
            authority: Vec::new(),
            additional: Vec::new(),
        }
    }

    fn srv(answer: &[&str], additional: &[&str]) -> Self {
        let additional = additional.iter().map(|&record| record.to_owned()).collect();
        Self { additional, ..Self::to(SERVICE, Rtype::SRV, answer) }
    }

    fn with_authority(self, authority: &[&str]) -> Self {
        Self { authority: authority.iter().map(|&record| record.to_owned()).collect(), ..self }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut message = MessageBuilder::new_vec();
        let header = message.header_mut();
        header.set_id(self.id);
        header.set_qr(true);
        header.set_opcode(Opcode::QUERY);
        header.set_rcode(self.rcode);
        header.set_tc(self.is_truncated);
        header.set_aa(self.is_authoritative);
        let mut message = message.question();
        message.push((name(&self.question.0), self.question.1)).unwrap();
        let mut message = message.answer();
        self.answer.iter().for_each(|record| push(&mut message, record));
        let mut message = message.authority();
        self.authority.iter().for_each(|record| push(&mut message, record));
        let mut message = message.additional();
        self.additional.iter().for_each(|record| push(&mut message, record));
        message.finish()
    }
}

fn push(to: &mut impl domain::base::message_builder::RecordSectionBuilder<Vec<u8>>, record: &str) {
    let words: Vec<&str> = record.split(' ').collect();
    let [owner, ttl, rtype, data @ ..] = words.as_slice() else { panic!("{record:?}") };
    let (owner, class, ttl) = (name(owner), Class::IN, Ttl::from_secs(ttl.parse().unwrap()));
    let number = |at: usize| data[at].parse().unwrap();
    match *rtype {
        "A" => to.push((owner, class, ttl, rdata::A::new(data[0].parse().unwrap()))),
        "AAAA" => to.push((owner, class, ttl, rdata::Aaaa::new(data[0].parse().unwrap()))),
        "CNAME" => to.push((owner, class, ttl, rdata::Cname::new(name(data[0])))),
        "NS" => to.push((owner, class, ttl, rdata::Ns::new(name(data[0])))),
        "SRV" => {
            to.push((owner, class, ttl, rdata::Srv::new(number(0), number(1), number(2), name(data[3]))))
        }
        "SOA" => {
            let (serial, zero) = (Serial::from(u32::from(number(0))), Ttl::ZERO);
            to.push((
                owner,
                class,
                ttl,
                rdata::Soa::new(name("."), name("."), serial, zero, zero, zero, zero),
            ))
        }
        _ => panic!("{record:?}"),
    }
    .unwrap();
}

fn read(reply: &Reply, origin: &DnsOrigin) -> Finding {
    read_list(&reply.bytes(), origin, false)
}

/// The endpoints of a list as `address weight`, and its notes.
#[track_caller]
fn endpoints(finding: &Finding) -> (Vec<String>, Vec<String>) {
    let Finding::List(snapshot) = finding else { panic!("{finding:?}") };
    let groups: serde_json::Value = serde_json::from_slice(&snapshot.text).unwrap();
    let endpoint = |group: &serde_json::Value| {
        let weight = group["labels"]["weight"].as_str().unwrap_or("1");
        format!("{} {weight}", group["targets"][0].as_str().unwrap())
    };
    let endpoints: Vec<String> = groups.as_array().unwrap().iter().map(endpoint).collect();
    assert_eq!(snapshot.endpoints, endpoints.len());
    (endpoints, snapshot.notes.clone())
}

#[track_caller]
fn why_empty(finding: Finding) -> String {
    let Finding::Empty { why } = finding else { panic!("{finding:?}") };
    why
}

#[track_caller]
fn malformed(finding: Finding) -> String {
    let Finding::Failed(Failure::Malformed(text)) = finding else { panic!("{finding:?}") };
    text
}

#[test]
fn only_records_with_the_lowest_priority_value_are_used_and_weight_0_becomes_1() {
    let records = [
        "_users._tcp.example.com 60 SRV 5 0 8080 a.example.com",
        "_users._tcp.example.com 60 SRV 5 65535 8081 b.example.com",
        "_users._tcp.example.com 60 SRV 9 3 8082 a.example.com",
        "_users._tcp.example.com 60 SRV 6 3 8082 c.example.com",
    ];
    let added = ["a.example.com 60 A 10.0.0.1", "B.Example.com 60 A 10.0.0.2", "a.example.com 60 AAAA ::1"];
    let (list, notes) = endpoints(&read(&Reply::srv(&records, &added), &srv()));
    assert_eq!(list, ["10.0.0.1:8080 1", "10.0.0.2:8081 65535"]);
    assert_eq!(notes, ["unused: 2 SRV records with a priority value above 5"]);
}

#[test]
fn weights_of_equal_addresses_add_up_but_a_repeated_record_counts_once() {
    let records = [
        "_users._tcp.example.com 60 SRV 0 10 80 a.example.com",
        "_users._tcp.example.com 60 SRV 0 10 80 A.example.com",
        "_users._tcp.example.com 60 SRV 0 7 80 b.example.com",
        "_users._tcp.example.com 60 SRV 0 60000 81 a.example.com",
        "_users._tcp.example.com 60 SRV 0 60000 81 b.example.com",
    ];
    let added = ["a.example.com 60 A 10.0.0.1", "b.example.com 60 A 10.0.0.1", "b.example.com 60 A 10.0.0.1"];
    let (list, notes) = endpoints(&read(&Reply::srv(&records, &added), &srv()));
    assert_eq!(list, ["10.0.0.1:80 17", "10.0.0.1:81 65535"]);
    assert_eq!(notes, ["in several SRV records: 10.0.0.1:80 and 1 more: the weights are added"]);
}

#[test]
fn the_order_of_records_does_not_change_the_text() {
    let mut records: Vec<String> =
        (1..=200).map(|n| format!("users.example.com 60 A 10.0.{}.{n}", n % 7)).collect();
    let text = |records: &[String]| {
        let reply = Reply { answer: records.to_vec(), ..Reply::to(HOST, Rtype::A, &[]) };
        read(&reply, &host())
    };
    let first = text(&records);
    assert_eq!(endpoints(&first).0.len(), 200);
    fastrand::Rng::with_seed(1).shuffle(&mut records);
    assert_eq!(text(&records), first);
    records.extend_from_within(..100);
    assert_eq!(text(&records), first, "repeated addresses count once");
}

#[test]
fn targets_without_addresses_of_the_family_are_left_out_with_a_note() {
    let targets = ["a", "b", "c", "d", "e", "f", "g"]
        .map(|target| format!("_users._tcp.example.com 60 SRV 0 1 80 {target}.example.com"));
    let reply = Reply { answer: targets.to_vec(), ..Reply::srv(&[], &["a.example.com 60 A 10.0.0.1"]) };
    let (list, notes) = endpoints(&read(&reply, &srv()));
    assert_eq!(list, ["10.0.0.1:80 1"]);
    assert!(
        notes[0].starts_with("6 targets without addresses, left out: b.example.com (not in"),
        "{notes:?}"
    );
    assert!(notes[0].ends_with("f.example.com (not in the answer) and 1 more"), "{notes:?}");
    assert!(why_empty(read_list(&reply.bytes(), &srv(), true)).starts_with("7 targets without addresses"));
}

#[test]
fn a_port_0_or_too_many_targets_refuse_the_whole_answer() {
    let good = "_users._tcp.example.com 60 SRV 0 1 80 a.example.com";
    let zero = "_users._tcp.example.com 60 SRV 0 1 0 b.example.com";
    assert_eq!(
        malformed(read(&Reply::srv(&[good, zero], &[]), &srv())),
        "the record for b.example.com has port 0"
    );
    let unused = "_users._tcp.example.com 60 SRV 1 1 0 b.example.com";
    let added = ["a.example.com 60 A 10.0.0.1"];
    endpoints(&read(&Reply::srv(&[good, unused], &added), &srv()));
    let many = |count: usize| {
        let records = (0..count).map(|n| format!("_users._tcp.example.com 60 SRV 0 1 80 b{n}."));
        read(&Reply { answer: records.collect(), ..Reply::srv(&[], &["b7. 60 A 10.0.0.7"]) }, &srv())
    };
    assert_eq!(endpoints(&many(1000)).0.len(), 1);
    let too_large = Failure::TooLarge("1001 different targets, but at most 1000".to_owned());
    assert_eq!(many(1001), Finding::Failed(too_large));
}

#[test]
fn aliases_lead_to_the_records_unless_they_are_a_loop_or_too_many() {
    let chain = |length: usize| {
        let mut records: Vec<String> =
            (1..length).map(|n| format!("c{n}.example.com 60 CNAME c{}.example.com", n + 1)).collect();
        records.insert(0, "users.example.com 60 CNAME c1.example.com".to_owned());
        records.push(format!("C{length}.example.com 60 A 10.0.0.1"));
        read(&Reply { answer: records, ..Reply::to(HOST, Rtype::A, &[]) }, &host())
    };
    assert_eq!(endpoints(&chain(1)).0, ["10.0.0.1:8080 1"]);
    assert_eq!(endpoints(&chain(16)).0, ["10.0.0.1:8080 1"]);
    let refused = "the aliases (CNAME) form a loop, or there are more than 16";
    assert_eq!(malformed(chain(17)), refused);
    let looped = ["users.example.com 60 CNAME a.", "a. 60 CNAME b.", "b. 60 CNAME users.example.com"];
    assert_eq!(malformed(read(&Reply::to(HOST, Rtype::A, &looped), &host())), refused);
    let itself = ["users.example.com 60 CNAME users.example.com", "users.example.com 60 A 10.0.0.1"];
    assert_eq!(malformed(read(&Reply::to(HOST, Rtype::A, &itself), &host())), refused);
    let nowhere = ["users.example.com 60 CNAME a.example.org", "b.example.org 60 A 10.0.0.1"];
    let why = why_empty(read(&Reply::to(HOST, Rtype::A, &nowhere), &host()));
    assert_eq!(why, "no A records at a.example.org, its alias");
}

#[test]
fn a_name_without_records_is_empty_and_a_refusal_is_a_failure() {
    let empty = |rcode| Reply { rcode, ..Reply::to(HOST, Rtype::A, &[]) };
    assert_eq!(why_empty(read(&empty(Rcode::NOERROR), &host())), "no A records");
    assert_eq!(why_empty(read(&empty(Rcode::NXDOMAIN), &host())), "NXDOMAIN");
    let dot = Reply::srv(&["_users._tcp.example.com 60 SRV 0 0 0 ."], &[]);
    assert_eq!(why_empty(read(&dot, &srv())), "the SRV record's target is \".\": no such service");
    let failed = |failure| Finding::Failed(failure);
    let text = |text: &str| text.to_owned();
    let servfail = Failure::Unreachable(text("the server answers SERVFAIL"));
    assert_eq!(read(&empty(Rcode::SERVFAIL), &host()), failed(servfail));
    let refused = Failure::Refused(text("the server answers REFUSED"));
    assert_eq!(read(&empty(Rcode::REFUSED), &host()), failed(refused));
    let mut referral = empty(Rcode::NOERROR).with_authority(&["example.com 60 NS ns.example.com"]);
    referral.is_authoritative = false;
    let referred = Failure::Refused(text("the server refers to other name servers instead of answering"));
    assert_eq!(read(&referral, &host()), failed(referred));
    let mut contradiction = Reply::to(HOST, Rtype::A, &["users.example.com 60 A 10.0.0.1"]);
    contradiction.rcode = Rcode::NXDOMAIN;
    assert_eq!(
        malformed(read(&contradiction, &host())),
        "the answer has the code NXDOMAIN, but it has records"
    );
}

#[test]
fn answers_that_are_truncated_or_to_another_question_are_refused() {
    let good = Reply::to(HOST, Rtype::A, &["users.example.com 60 A 10.0.0.1"]);
    endpoints(&read(&good, &host()));
    let truncated = Reply { is_truncated: true, ..good.clone() };
    assert_eq!(malformed(read(&truncated, &host())), "the answer is truncated");
    let other_name = Reply { question: ("mail.example.com".to_owned(), Rtype::A), ..good.clone() };
    let other_type = Reply { question: (HOST.to_owned(), Rtype::AAAA), ..good.clone() };
    for other in [other_name, other_type] {
        assert_eq!(malformed(read(&other, &host())), "the answer is to another question");
    }
    let mut query = good.bytes();
    query[2] &= 0x7f;
    assert_eq!(malformed(read_list(&query, &host(), false)), "the message is not an answer");
    let records = ["users.example.com 60 A 10.0.0.1", "mail.example.com 60 A 10.0.0.2"];
    let (list, _) = endpoints(&read(&Reply::to(HOST, Rtype::A, &records), &host()));
    assert_eq!(list, ["10.0.0.1:8080 1"], "records of other names are ignored");
}

#[test]
fn a_cut_message_is_refused_wherever_it_is_cut() {
    let records = ["_users._tcp.example.com 60 SRV 0 1 80 a.example.com"];
    let reply = Reply::srv(&records, &["a.example.com 60 A 10.0.0.1"]);
    let bytes = reply.with_authority(&["example.com 60 SOA 7"]).bytes();
    for length in 0..bytes.len() {
        malformed(read_list(&bytes[..length], &srv(), false));
    }
    let Finding::List(list) = read_list(&bytes, &srv(), false) else {
        panic!("the complete message was rejected")
    };
    assert_eq!(list.version, "7");
}

#[test]
fn the_shortest_ttl_counts_and_one_above_the_highest_is_0() {
    let ttl = |ttl: u32| {
        let alias = format!("users.example.com {ttl} CNAME a.example.com");
        let records =
            [alias.as_str(), "a.example.com 4000000 A 10.0.0.1", "a.example.com 3000000 A 10.0.0.2"];
        let question = Question::addresses(HOST, false).unwrap();
        match message::read::<IpAddr>(&Reply::to(HOST, Rtype::A, &records).bytes(), &question) {
            Ok(Lookup::Records(records)) => records.ttl.as_secs(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!([60, 0, 3_500_000, 1 << 31, u32::MAX].map(ttl), [60, 0, 3_000_000, 0, 0]);
    let settings = settings(&[], DnsTransport::Tcp);
    let clamped = [0, 5, 60, 3_000_000].map(|ttl| clamp(Duration::from_secs(ttl), &settings).as_secs());
    assert_eq!(clamped, [5, 5, 60, 300]);
}

#[test]
fn names_in_messages_cannot_control_a_terminal() {
    let target = Name::<Vec<u8>>::from_octets(b"\x05\x1b[2J\x9b\x00".to_vec()).unwrap();
    let mut message = MessageBuilder::new_vec().question();
    message.header_mut().set_qr(true);
    message.push((name(SERVICE), Rtype::SRV)).unwrap();
    let mut message = message.answer();
    message.push((name(SERVICE), Class::IN, Ttl::ZERO, rdata::Srv::new(0, 0, 80, target))).unwrap();
    let why = why_empty(read_list(&message.finish(), &srv(), false));
    assert_eq!(why, "1 target without addresses, left out: \\027[2j\\155 (not in the answer)");
}

#[test]
fn a_name_that_is_parsed_can_be_queried() {
    let target = Name::<Vec<u8>>::from_octets(b"\x09\x1b. \\\"();@\x03com\x00".to_vec()).unwrap();
    let text = target.to_string();
    let request = Question::addresses(&text, false).unwrap().request();
    let request = domain::net::client::request::ComposeRequest::to_message(&request).unwrap();
    assert_eq!(Message::first_question(&request).unwrap().qname(), &target);
}

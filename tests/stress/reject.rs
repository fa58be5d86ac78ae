//! Rejects connects like a firewall, but without a firewall: answers SYNs to some ports with ICMP
//! errors. The listeners at these ports drop the SYNs, so that nothing else answers.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto};
use stage::stress::{NO_HOST, NO_NETWORK, NO_PORT, NO_PROTOCOL};

/// Ports, each with its code of the ICMP answer "destination unreachable".
const CODES: [(u16, u8); 4] = [(NO_NETWORK, 0), (NO_HOST, 1), (NO_PROTOCOL, 2), (NO_PORT, 3)];

/// Begins to listen, and rejects SYNs on a separate thread until the process ends.
pub fn start() -> Result<()> {
    let raw = |protocol| {
        rustix::net::socket_with(AddressFamily::INET, SocketType::RAW, SocketFlags::CLOEXEC, Some(protocol))
    };
    let seen = raw(ipproto::TCP).context("open a raw socket")?;
    stage::filter::see_only_dials(&seen, NO_HOST..=NO_NETWORK)?;
    let icmp = raw(ipproto::ICMP).context("open a raw socket")?;
    std::thread::Builder::new().name("reject".to_owned()).spawn(move || reject(&seen, &icmp))?;
    Ok(())
}

fn reject(seen: &OwnedFd, icmp: &OwnedFd) {
    let mut packet = [0; 128];
    // The loop ends with the process.
    loop {
        let (length, _) = rustix::net::recv(seen, &mut packet, RecvFlags::empty()).expect("receive a packet");
        let Some((to, answer)) = packet.get(..length).and_then(answer) else { continue };
        rustix::net::sendto(icmp, &answer, SendFlags::empty(), &SocketAddrV4::new(to, 0))
            .expect("send the answer");
    }
}

/// The answer to a SYN: its destination and its bytes.
fn answer(packet: &[u8]) -> Option<(Ipv4Addr, Vec<u8>)> {
    let header = usize::from(packet.first()? & 0x0f) * 4;
    let from: [u8; 4] = packet.get(12..16)?.try_into().ok()?;
    let port = u16::from_be_bytes(packet.get(header + 2..header + 4)?.try_into().ok()?);
    let (_, code) = CODES.iter().find(|(rejected, _)| *rejected == port)?;
    const UNREACHABLE: u8 = 3;
    let mut answer = vec![UNREACHABLE, *code, 0, 0, 0, 0, 0, 0];
    // The answer contains the header of the received packet and eight more bytes: ports and
    // sequence number.
    answer.extend(packet.get(..header + 8)?);
    let sum = checksum(&answer);
    answer[2..4].copy_from_slice(&sum.to_be_bytes());
    Some((Ipv4Addr::from(from), answer))
}

/// The Internet checksum of an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    !u16::try_from(folded).expect("folded twice")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_of_a_syn_decides_the_icmp_error() {
        let mut packet = vec![0x45; 1];
        packet.extend([0; 11]);
        packet.extend([127, 0, 0, 1, 127, 9, 0, 1]);
        packet.extend(4242u16.to_be_bytes());
        packet.extend(NO_PORT.to_be_bytes());
        packet.extend([0; 16]);
        let (to, answer) = answer(&packet).unwrap();
        assert_eq!((to, &answer[..2], answer.len()), (Ipv4Addr::LOCALHOST, &[3, 3][..], 8 + 20 + 8));
        assert_eq!(checksum(&answer), 0, "a message with its checksum in it");
    }
}

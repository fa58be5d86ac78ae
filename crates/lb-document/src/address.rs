//! Parses addresses, and explains why a text is not an address.

use std::net::{IpAddr, SocketAddr};

use super::kind::Refusal;
use crate::diagnostic::quote;

#[derive(Debug, PartialEq, Eq)]
pub struct NotAnAddress {
    /// The reason. In a message, the reason follows the quoted text.
    pub why: &'static str,
    pub help: String,
}

/// Parses an address like [`parse_address`]. The message of the error begins with the quoted text.
pub fn address(text: &str) -> Result<SocketAddr, Refusal> {
    parse_address(text).map_err(|NotAnAddress { why, help }| (format!("{} {why}", quote(text)), Some(help)))
}

/// Parses `IP:port` or `[IPv6]:port`.
pub fn parse_address(text: &str) -> Result<SocketAddr, NotAnAddress> {
    let refusal = |why, help: String| Err(NotAnAddress { why, help });
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let example =
        || "write an IP address and a port, as in \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\"".to_owned();
    match text.parse() {
        Ok(IpAddr::V4(ip)) => {
            return refusal("has no port", format!("write \"{ip}:8080\", with the right port"));
        }
        Ok(IpAddr::V6(ip)) => {
            return refusal("has no port", format!("write \"[{ip}]:8080\", with the right address and port"));
        }
        Err(_) => {}
    }
    let (host, port) = text.rsplit_once(':').unwrap_or((text, ""));
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let ip: Result<IpAddr, _> = host.trim_start_matches('[').trim_end_matches(']').parse();
    if digits && ip.is_ok() {
        return refusal("has a wrong port", "write 1 to 65535".to_owned());
    }
    let name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    if host.bytes().all(name) && host.bytes().any(|byte| byte.is_ascii_alphabetic()) {
        return refusal("is a host name, not an address", example());
    }
    refusal("is not an address", example())
}

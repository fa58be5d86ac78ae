//! Makes shapes of frames from the bytes of a text.

use lb_report::fixtures::Shape;

/// Makes a shape from four bytes and a length offset.
pub fn shape([tags, options, fragment, protocol]: [u8; 4], length_off: i16) -> Shape {
    let tag = |bits: u8| [0, 0x8100, 0x88a8, 0x0806][usize::from(bits % 4)];
    Shape {
        tags: [tag(tags), tag(tags >> 2)],
        options: options % 11,
        fragment: u16::from(fragment) << 8,
        protocol: if protocol < 240 { 17 } else { protocol },
        length_off,
    }
}

/// Whether the programs of network interfaces find a UDP datagram in a frame with this shape.
pub fn holds_udp(shape: Shape, is_v6: bool) -> bool {
    let tags: Vec<u16> = shape.tags.into_iter().filter(|tag| *tag != 0).collect();
    (tags.is_empty() || tags == [0x8100] || tags == [0x88a8])
        && shape.protocol == 17
        && (is_v6 || shape.fragment & 0x3fff == 0)
}

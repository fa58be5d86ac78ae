//! The bytes of a packet on a network interface. Each access follows a comparison with the packet's
//! end, as the verifier requires.

use core::arch::asm;

use aya_ebpf::programs::XdpContext;
use lb_report::frame::{Frame, FrameMut, Header, Payload};
use lb_report::wire::BYTES;

#[derive(Clone, Copy)]
pub struct Packet {
    data: usize,
    end: usize,
}

/// The maximum distance in bytes from the beginning of a packet to the end of its datagram: with a
/// VLAN tag and all IP options.
const FARTHEST: usize = 14 + 4 + 60 + 8 + BYTES;

impl Packet {
    #[inline(always)]
    pub fn of(ctx: &XdpContext) -> Self {
        Self { data: ctx.data(), end: ctx.data_end() }
    }

    /// The address of `length` bytes at an offset, if the packet has them.
    #[inline(always)]
    fn at(&self, offset: usize, length: usize) -> Option<usize> {
        if offset > FARTHEST {
            return None;
        }
        let mut start = self.data;
        // The compiler must not compute this address twice, once for the comparison and once for
        // the reads, because the verifier knows only the bounds of the compared register. The
        // assembly prevents the second computation.
        // SAFETY: the instruction only adds.
        unsafe { asm!("{0} += {1}", inout(reg) start, in(reg) offset, options(pure, nomem, nostack)) };
        if start + length > self.end { None } else { Some(start) }
    }
}

impl Frame for Packet {
    #[inline(always)]
    fn header<H: Header>(&self, offset: usize) -> Option<H> {
        let start = self.at(offset, size_of::<H>())?;
        // SAFETY: the packet has the bytes, and any bytes are a valid header.
        Some(unsafe { (start as *const H).read_unaligned() })
    }

    #[inline(always)]
    fn datagram(&self, offset: usize, into: &mut Payload) -> Option<()> {
        let start = self.at(offset, BYTES)?;
        *into = [
            word::<0>(start),
            word::<8>(start),
            word::<16>(start),
            word::<24>(start),
            word::<32>(start),
            word::<40>(start),
            word::<48>(start),
            word::<56>(start),
            word::<64>(start),
            word::<72>(start),
        ];
        Some(())
    }
}

impl FrameMut for Packet {
    #[inline(always)]
    fn put_header<H: Header>(&mut self, offset: usize, header: H) -> Option<()> {
        let start = self.at(offset, size_of::<H>())?;
        // SAFETY: the packet has the bytes.
        unsafe { (start as *mut H).write_unaligned(header) };
        Some(())
    }

    #[inline(always)]
    fn put_datagram(&mut self, offset: usize, [a, b, c, d, e, f, g, h, i, j]: &Payload) -> Option<()> {
        let start = self.at(offset, BYTES)?;
        put::<0>(start, *a);
        put::<8>(start, *b);
        put::<16>(start, *c);
        put::<24>(start, *d);
        put::<32>(start, *e);
        put::<40>(start, *f);
        put::<48>(start, *g);
        put::<56>(start, *h);
        put::<64>(start, *i);
        put::<72>(start, *j);
        Some(())
    }
}

/// Reads the word at an offset of `start`, which must be within the packet. LLVM would read a word
/// at a possibly odd address byte by byte, with eight times as many instructions; but the kernel
/// permits unaligned reads of packets on processors that support them.
#[inline(always)]
fn word<const OFFSET: usize>(start: usize) -> u64 {
    let word: u64;
    // SAFETY: the caller has compared with the packet's end.
    unsafe {
        asm!(
            "{0} = *(u64 *)({1} + {offset})",
            out(reg) word,
            in(reg) start,
            offset = const OFFSET,
            options(pure, readonly, nostack)
        );
    }
    word
}

/// Writes the word at an offset of `start`, which must be within the packet, in one instruction.
#[inline(always)]
fn put<const OFFSET: usize>(start: usize, word: u64) {
    // SAFETY: the caller has compared with the packet's end.
    unsafe {
        asm!(
            "*(u64 *)({0} + {offset}) = {1}",
            in(reg) start,
            in(reg) word,
            offset = const OFFSET,
            options(nostack)
        );
    }
}

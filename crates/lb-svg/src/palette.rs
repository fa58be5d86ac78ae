//! Colours, each for a light and a dark page, and the style that every figure contains.
//!
//! A figure appears inside a page and as a separate file. So its style has no custom properties:
//! viewers that are not browsers (librsvg, Inkscape) support classes, but not `var()`. Colour is
//! never the only distinction: every series has a label where it is drawn. The caller assigns a
//! meaning to a hue by creating a [`Paint`] with a name for this meaning.

use std::fmt::Write as _;

/// A colour as `0xRRGGBB`: first for a light page, then for a dark one.
pub type Hue = [u32; 2];

/// For bad results, or for results that depend on chance.
pub const RED: Hue = [0xb3_42_1c, 0xf2_8f_66];
/// For a series.
pub const BLUE: Hue = [0x2a_60_b0, 0x82_b2_f5];
/// For a series.
pub const OCHRE: Hue = [0x85_5d_00, 0xd8_ae_4e];
/// For socklb's own results.
pub const GREEN: Hue = [0x0b_71_61, 0x4f_c4_b0];
/// For a series.
pub const VIOLET: Hue = [0x78_3c_97, 0xca_9c_e4];

/// A hue, and the word that states its meaning in class names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paint {
    /// The word, which has only letters.
    pub name: &'static str,
    pub hue: Hue,
}

impl Paint {
    /// For the background.
    pub const PAPER: Self = Self::new("paper", [0xff_ff_ff, 0x14_18_1c]);
    /// For text, and for numbers published by other authors.
    pub const INK: Self = Self::new("ink", [0x1b_22_28, 0xe6_ea_ed]);
    /// For titles of axes, ticks and notes.
    pub const QUIET: Self = Self::new("quiet", [0x55_60_6a, 0xa2_ad_b6]);
    /// For the lines of the grid, which contain no information.
    pub const RULE: Self = Self::new("rule", [0xdd_e2_e6, 0x2d_34_3b]);
    /// The paints of every figure, in addition to the figure's own paints.
    pub const COMMON: [Self; 4] = [Self::PAPER, Self::INK, Self::QUIET, Self::RULE];

    pub const fn new(name: &'static str, hue: Hue) -> Self {
        Self { name, hue }
    }
}

/// Fonts that are already installed on the reader's system, so that nothing is loaded.
pub const FONTS: &str =
    "system-ui, -apple-system, \"Segoe UI\", Roboto, \"Helvetica Neue\", Arial, \"DejaVu Sans\", sans-serif";

/// The opacities of a density, from few points to many. There are five, because more could not be
/// distinguished.
pub const SHADES: [f64; 5] = [0.25, 0.42, 0.60, 0.80, 1.0];

/// The style of figures that use the [`Paint::COMMON`] paints and these paints. The style is the
/// same inside a page and in separate files.
pub fn style(own: &[Paint]) -> String {
    let mut css = format!(
        ".fig{{font-family:{FONTS}}}\
         .fig text{{font-size:12px;font-variant-numeric:tabular-nums}}\
         .fig .label{{font-size:13px}}\
         .fig .strong{{font-size:13px;font-weight:600}}\
         .fig .halo{{paint-order:stroke;stroke-width:3px;stroke-linejoin:round}}\
         .fig .open{{fill:none}}\
         .fig .thin{{stroke-width:1}}.fig .line{{stroke-width:1.75;stroke-linejoin:round}}.fig .thick{{stroke-width:6}}.fig .around{{stroke-width:3.5;stroke-opacity:.8}}\
         .fig .dashed{{stroke-dasharray:5 3}}.fig .dotted{{stroke-dasharray:1.5 3}}\
         .fig .tint{{fill-opacity:.18}}"
    );
    for (shade, opacity) in SHADES.iter().enumerate() {
        write!(css, ".fig .shade-{shade}{{fill-opacity:{opacity}}}")
            .expect("writing to a string cannot fail");
    }
    paints(&mut css, own, 0);
    css.push_str("@media (prefers-color-scheme:dark){");
    paints(&mut css, own, 1);
    css.push('}');
    css
}

fn paints(css: &mut String, own: &[Paint], scheme: usize) {
    let paper = Paint::PAPER.hue[scheme];
    write!(css, ".fig{{background:#{paper:06x}}}").expect("writing to a string cannot fail");
    for Paint { name, hue } in Paint::COMMON.iter().chain(own) {
        let colour = hue[scheme];
        write!(css, ".fig .fill-{name}{{fill:#{colour:06x}}}.fig .stroke-{name}{{stroke:#{colour:06x}}}")
            .expect("writing to a string cannot fail");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Relative luminance of sRGB, as defined by the Web Content Accessibility Guidelines.
    fn luminance(colour: u32) -> f64 {
        let channel = |shift: u32| {
            let value = f64::from(colour >> shift & 0xff) / 255.0;
            if value <= 0.040_45 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * channel(16) + 0.7152 * channel(8) + 0.0722 * channel(0)
    }

    #[test]
    fn text_has_enough_contrast_with_the_background() {
        for scheme in [0, 1] {
            let paper = luminance(Paint::PAPER.hue[scheme]);
            for hue in [Paint::INK.hue, Paint::QUIET.hue, RED, BLUE, OCHRE, GREEN, VIOLET] {
                let other = luminance(hue[scheme]);
                let contrast = (paper.max(other) + 0.05) / (paper.min(other) + 0.05);
                // The guidelines' level AA for text of any size.
                assert!(contrast >= 4.5, "{hue:x?} in scheme {scheme}: {contrast}");
            }
        }
    }
}

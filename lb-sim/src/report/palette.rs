//! The colours of the report, each for a light and a dark page, and the style that every figure carries.
//!
//! A figure is looked at inside the page and alone, so its style has no custom properties: viewers that are no browsers
//! (librsvg, Inkscape) know classes, but not `var()`. Colour never tells alone: every series is labelled where it is
//! drawn. Must not know what is drawn.

use std::fmt::Write as _;

/// What is painted, named for what it means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paint {
    /// Behind everything.
    Paper,
    /// Text, and what a source has published.
    Ink,
    /// Titles of axes, ticks, notes.
    Quiet,
    /// Lines of the grid: not to be read.
    Rule,
    /// Random subsets, consistent subsetting: what is left to chance.
    Random,
    /// Deterministic subsetting and the aperture.
    Deterministic,
    /// The van der Corput ring.
    Ringsteady,
    /// Rocksteadier.
    Rocksteadier,
    /// Rocksteadier with structural weights.
    Weighted,
}

impl Paint {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Paper,
        Self::Ink,
        Self::Quiet,
        Self::Rule,
        Self::Random,
        Self::Deterministic,
        Self::Ringsteady,
        Self::Rocksteadier,
        Self::Weighted,
    ];

    /// The word for it in class names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Paper => "paper",
            Self::Ink => "ink",
            Self::Quiet => "quiet",
            Self::Rule => "rule",
            Self::Random => "random",
            Self::Deterministic => "deterministic",
            Self::Ringsteady => "ringsteady",
            Self::Rocksteadier => "rocksteadier",
            Self::Weighted => "weighted",
        }
    }

    /// As `0xRRGGBB`, on a light and on a dark page.
    pub const fn colours(self) -> [u32; 2] {
        match self {
            Self::Paper => [0xff_ff_ff, 0x14_18_1c],
            Self::Ink => [0x1b_22_28, 0xe6_ea_ed],
            Self::Quiet => [0x55_60_6a, 0xa2_ad_b6],
            Self::Rule => [0xdd_e2_e6, 0x2d_34_3b],
            Self::Random => [0xb3_42_1c, 0xf2_8f_66],
            Self::Deterministic => [0x2a_60_b0, 0x82_b2_f5],
            Self::Ringsteady => [0x85_5d_00, 0xd8_ae_4e],
            Self::Rocksteadier => [0x0b_71_61, 0x4f_c4_b0],
            Self::Weighted => [0x78_3c_97, 0xca_9c_e4],
        }
    }
}

/// Fonts that a machine has anyway: nothing is fetched.
pub const FONTS: &str =
    "system-ui, -apple-system, \"Segoe UI\", Roboto, \"Helvetica Neue\", Arial, \"DejaVu Sans\", sans-serif";

/// Shades of a density, from few to many: five, because an eye tells no more apart.
pub const SHADES: [f64; 5] = [0.25, 0.42, 0.60, 0.80, 1.0];

/// The style of a figure, the same alone and inside the page.
pub fn figure_style() -> String {
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
        write!(css, ".fig .shade-{shade}{{fill-opacity:{opacity}}}").expect("a string takes all");
    }
    paints(&mut css, 0);
    css.push_str("@media (prefers-color-scheme:dark){");
    paints(&mut css, 1);
    css.push('}');
    css
}

fn paints(css: &mut String, scheme: usize) {
    let paper = Paint::Paper.colours()[scheme];
    write!(css, ".fig{{background:#{paper:06x}}}").expect("a string takes all");
    for paint in Paint::ALL {
        let (name, colour) = (paint.name(), paint.colours()[scheme]);
        write!(css, ".fig .fill-{name}{{fill:#{colour:06x}}}.fig .stroke-{name}{{stroke:#{colour:06x}}}")
            .expect("a string takes all");
    }
}

/// The same colours as custom properties, for the page around the figures.
pub fn page_colours(scheme: usize) -> String {
    let property = |paint: Paint| format!("--{}:#{:06x};", paint.name(), paint.colours()[scheme]);
    Paint::ALL.map(property).concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Relative luminance of sRGB, by the definition of the Web Content Accessibility Guidelines.
    fn luminance(colour: u32) -> f64 {
        let channel = |shift: u32| {
            let value = f64::from(colour >> shift & 0xff) / 255.0;
            if value <= 0.040_45 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * channel(16) + 0.7152 * channel(8) + 0.0722 * channel(0)
    }

    #[test]
    fn everything_to_be_read_stands_out_from_the_paper() {
        for scheme in [0, 1] {
            let paper = luminance(Paint::Paper.colours()[scheme]);
            for paint in Paint::ALL {
                let other = luminance(paint.colours()[scheme]);
                let contrast = (paper.max(other) + 0.05) / (paper.min(other) + 0.05);
                if !matches!(paint, Paint::Paper | Paint::Rule) {
                    // The guidelines' level AA for text of any size.
                    assert!(contrast >= 4.5, "{paint:?} in scheme {scheme}: {contrast}");
                }
            }
        }
    }
}

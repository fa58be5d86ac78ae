//! A figure: a drawing with a title and a description, as a separate file or inside a page.
//!
//! Both forms contain a description of the drawing for readers that cannot see it. This module must
//! not depend on the design of pages.

use crate::drawing::{Drawing, escaped};
use crate::palette::{Paint, style};

/// A drawing with a name to which links can refer.
#[derive(Clone, Debug)]
pub struct Figure {
    /// The figure's name in links, and its file name without extension.
    pub id: &'static str,
    /// A title of one line.
    pub title: String,
    /// A description of the drawing, in a sentence or two.
    pub description: String,
    pub drawing: Drawing,
}

impl Figure {
    /// Returns the figure as part of a page. The page must have the [`style`] of figures.
    pub fn inline(&self) -> String {
        self.svg("", "")
    }

    /// Returns the figure as a separate file, with a background and with the style of these paints.
    pub fn alone(&self, paints: &[Paint]) -> String {
        let sheet = "<rect class=\"fill-paper\" width=\"100%\" height=\"100%\"/>\n";
        let style = format!("<style>{}</style>\n{sheet}", style(paints));
        self.svg(" xmlns=\"http://www.w3.org/2000/svg\"", &style)
    }

    fn svg(&self, namespace: &str, style: &str) -> String {
        let Self { id, title, description, drawing } = self;
        let (width, height) = (drawing.width, drawing.height);
        format!(
            "<svg class=\"fig\"{namespace} viewBox=\"0 0 {width} {height}\" role=\"img\" \
             aria-labelledby=\"{id}-title {id}-words\">\n\
             <title id=\"{id}-title\">{}</title>\n<desc id=\"{id}-words\">{}</desc>\n{style}{}</svg>\n",
            escaped(title),
            escaped(description),
            drawing.body()
        )
    }
}

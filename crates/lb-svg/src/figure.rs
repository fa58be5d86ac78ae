//! A figure: a drawing with its name and its words, alone as a file or inside a page.
//!
//! Both forms say what is to be seen to readers that do not see it. Must not know how pages look.

use crate::drawing::{Drawing, escaped};
use crate::palette::{Paint, style};

/// A drawing that can be pointed at.
#[derive(Clone, Debug)]
pub struct Figure {
    /// Its name in links, and of its file without the ending.
    pub id: &'static str,
    /// One line.
    pub title: String,
    /// What one would see, in a sentence or two.
    pub description: String,
    /// The drawing.
    pub drawing: Drawing,
}

impl Figure {
    /// As part of a page that has the [`style`] of figures.
    pub fn inline(&self) -> String {
        self.svg("", "")
    }

    /// As a file of its own, with a sheet of paper and the style of these paints.
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

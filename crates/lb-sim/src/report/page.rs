//! The page: all sections, one after the other, in one file that needs no other file.
//!
//! The page is also valid XML. It loads no scripts, fonts or pictures. This module must not compute
//! anything.

use lb_svg::palette::{FONTS, style};
use lb_svg::{Figure, Paint, escaped};

use super::directory::MARK;
use super::palette::PAINTS;
use super::section::{NumberTable, ReportSection};

/// A publication with figures in the report, and the address of the publication.
struct Citation {
    words: &'static str,
    address: &'static str,
}

const CITATIONS: [Citation; 3] = [
    Citation {
        words: "The book: Site Reliability Engineering, chapter 20, \u{201c}Load Balancing in the Datacenter\u{201d}. \
                O\u{2019}Reilly, 2016.",
        address: "https://sre.google/sre-book/load-balancing-datacenter/",
    },
    Citation {
        words: "The article: Peter Ward, Paul Wankadia and Kavita Guliani, \u{201c}Reinventing Backend Subsetting at \
                Google\u{201d}. ACM Queue 20(5), 2022; Communications of the ACM, May 2023.",
        address: "https://queue.acm.org/detail.cfm?id=3570937",
    },
    Citation {
        words: "The post: \u{201c}Deterministic Aperture: A distributed, load balancing algorithm\u{201d}. Twitter, 19 \
                December 2019.",
        address: "https://blog.twitter.com/engineering/en_us/topics/infrastructure/2019/daperture-load-balancer",
    },
];

/// The addresses of the cited publications, to which the page links.
#[cfg(test)]
pub fn citations() -> impl Iterator<Item = &'static str> {
    CITATIONS.iter().map(|source| source.address)
}

const STYLE: &str = include_str!("page.css");

pub fn page(sections: &[ReportSection]) -> String {
    let contents: String = sections
        .iter()
        .map(|section| format!("<li><a href=\"#{}\">{}</a></li>\n", section.id, escaped(section.heading)))
        .collect();
    let sources: String = CITATIONS
        .iter()
        .map(|source| {
            format!(
                "<li>{} <a href=\"{}\">{}</a></li>\n",
                escaped(source.words),
                source.address,
                short(source.address)
            )
        })
        .collect();
    let sections: String = sections.iter().map(section).collect();
    let [light, dark] = [0, 1].map(colours);
    let figures = style(&PAINTS);
    // The doctype comes first: anything before it would switch old browsers to quirks mode.
    format!(
        "<!DOCTYPE html>\n{MARK}\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta name=\"color-scheme\" content=\"light dark\"/>\n\
         <title>Subsets in pictures \u{b7} socklb</title>\n\
         <style>\n:root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n\
         body{{font-family:{FONTS}}}\n{STYLE}{figures}\n</style>\n</head>\n<body>\n<header>\n\
         <h1>Subsets in pictures</h1>\n\
         <p class=\"lead\">Every client task of a job uses only some of a service\u{2019}s backends. The choice of backends decides \
         how even the load is, how many connections the clients need, and how many connections close when a job is resized. This \
         page shows the figures of three publications on this choice, computed with the decisions of socklb\u{2019}s daemon, each \
         beside the numbers from its publication.</p>\n\
         <p>All job seeds are 0 unless the text states otherwise, so the same build writes the same page. A <em>client</em> is a \
         task that connects, a <em>backend</em> is a task that accepts connections; each of M clients uses k of N backends.</p>\n\
         <nav aria-label=\"Contents\">\n<ol>\n{contents}</ol>\n</nav>\n</header>\n<main>\n{sections}</main>\n<footer>\n\
         <h2 id=\"sources\">Sources</h2>\n<ul>\n{sources}</ul>\n</footer>\n</body>\n</html>\n"
    )
}

/// The figures' colours on a light or a dark page, as custom properties for the page around the
/// figures.
fn colours(scheme: usize) -> String {
    let property = |paint: &Paint| format!("--{}:#{:06x};", paint.name, paint.hue[scheme]);
    Paint::COMMON.iter().chain(&PAINTS).map(property).collect()
}

/// The host name of an address.
fn short(address: &str) -> &str {
    let bare = address.trim_start_matches("https://");
    bare.split('/').next().unwrap_or(bare)
}

/// Text for HTML: with typographic apostrophes, and escaped.
fn prose(words: &str) -> String {
    escaped(&words.replace('\'', "\u{2019}"))
}

fn section(section: &ReportSection) -> String {
    let figures: String = section.figures.iter().map(figure).collect();
    let reading: String = section.reading.iter().map(|words| format!("<p>{}</p>\n", prose(words))).collect();
    // If the number of figures is odd, the text is placed beside the last figure.
    let side = if section.figures.len() % 2 == 1 { "beside" } else { "below" };
    format!(
        "<section id=\"{}\">\n<h2>{}</h2>\n<div class=\"figures\">\n{figures}<div class=\"{side}\">\n<div>\n{reading}</div>\n\
         {}</div>\n</div>\n</section>\n",
        section.id,
        escaped(section.heading),
        table(&section.table)
    )
}

fn figure(figure: &Figure) -> String {
    let id = figure.id;
    format!(
        "<figure id=\"{id}\">\n<figcaption><span>{}</span> <a href=\"{id}.svg\" aria-label=\"This figure as a file\">SVG</a></figcaption>\n\
         {}</figure>\n",
        escaped(&figure.title),
        figure.inline()
    )
}

fn table(table: &NumberTable) -> String {
    let head: String =
        table.head.iter().map(|word| format!("<th scope=\"col\">{}</th>", escaped(word))).collect();
    let row = |cells: &Vec<String>| {
        let (first, others) = cells.split_first().expect("a row has a cell for every column");
        let others: String = others.iter().map(|cell| format!("<td>{}</td>", escaped(cell))).collect();
        format!("<tr><th scope=\"row\">{}</th>{others}</tr>\n", escaped(first))
    };
    let rows: String = table.rows.iter().map(row).collect();
    format!("<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n")
}

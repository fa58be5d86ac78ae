//! Checks each file of the report: browsers and XML readers accept it, it loads no other files, no
//! text is cut off, and the numbers are those of the metrics.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use lb_core::subset::Algorithm;
use lb_svg::{Figure, escaped};
use roxmltree::{Document, Node, ParsingOptions};

use super::*;
use crate::fleet::{Fleet, Sharing};
use crate::metrics::churn::churn;
use crate::metrics::{Spread, mean, raw_utilization};
use crate::sweep::Sweep;
use crate::sweep::summary::Summary;

/// Small computations: the page has all its sections and figures, but figures have less content.
const LITTLE: Extent = Extent { most_tasks: 40, most_size: 30, trials: 3, load_seconds: 10 };

/// The sections with the extent `LITTLE`. Most tests read them, so they are computed once.
static SECTIONS: LazyLock<Vec<ReportSection>> = LazyLock::new(|| sections(LITTLE, &ProgressBar::hidden()));

fn little() -> &'static [ReportSection] {
    &SECTIONS
}

#[track_caller]
fn parsed(text: &str) -> Document<'_> {
    let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
    Document::parse_with_options(text, options).unwrap()
}

fn attributes<'a>(document: &'a Document<'_>, name: &str) -> Vec<&'a str> {
    document.descendants().filter_map(|node| node.attribute(name)).collect()
}

const FIGURES: [&str; 33] = [
    "fig-20-3",
    "fig-20-4",
    "fig-20-5",
    "fig-shuffles",
    "fig-1",
    "fig-2a",
    "fig-2b",
    "fig-2c",
    "fig-2d",
    "fig-2-rocksteadier",
    "fig-unweighted",
    "fig-weighted",
    "fig-3-deterministic",
    "fig-3-rocksteadier",
    "fig-4a",
    "fig-4b",
    "fig-4c",
    "fig-5",
    "fig-5-closed",
    "fig-frontend-churn",
    "fig-size-churn",
    "fig-spread",
    "fig-rps-mesh",
    "fig-ring-discrete",
    "fig-ring-continuous",
    "fig-sessions",
    "fig-topology",
    "fig-rps",
    "fig-sizes-300",
    "fig-sizes-1000",
    "fig-20-1",
    "fig-20-2",
    "fig-20-6",
];

#[test]
fn every_figure_is_in_the_page_and_in_a_separate_file() {
    let files = files(little());
    let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
    let expected: Vec<String> =
        std::iter::once("index.html".to_owned()).chain(FIGURES.map(|id| format!("{id}.svg"))).collect();
    assert_eq!(names, expected);
    let page = parsed(&files[0].1);
    let figures: Vec<&str> = page
        .descendants()
        .filter(|node| node.has_tag_name("figure"))
        .filter_map(|node| node.attribute("id"))
        .collect();
    assert_eq!(figures, FIGURES);
}

#[test]
fn identifiers_are_unique_and_every_link_has_a_target() {
    let files = files(little());
    let page = parsed(&files[0].1);
    let ids = attributes(&page, "id");
    let unique: BTreeSet<&str> = ids.iter().copied().collect();
    assert_eq!(unique.len(), ids.len());
    for link in attributes(&page, "href") {
        let inside = link.strip_prefix('#').is_some_and(|id| unique.contains(id));
        let beside = files.iter().any(|(name, _)| name == link);
        assert!(inside || beside || page::citations().any(|address| address == link), "{link}");
    }
    for labels in attributes(&page, "aria-labelledby") {
        assert!(labels.split(' ').all(|id| unique.contains(id)), "{labels}");
    }
}

#[test]
fn pages_and_figures_load_no_other_files() {
    for (name, text) in files(little()) {
        let document = parsed(&text);
        for node in document.descendants().filter(Node::is_element) {
            let tag = node.tag_name().name();
            assert!(
                !["script", "link", "img", "image", "use", "iframe", "object", "embed"].contains(&tag),
                "{name}"
            );
            assert_eq!(node.attribute("src"), None, "{name}");
            assert!(tag == "a" || node.attribute("href").is_none(), "{name}: {tag}");
        }
        assert!(!text.contains("url(") && !text.contains("@import"), "{name}");
    }
}

#[test]
fn every_class_of_a_figure_has_a_style() {
    let style = lb_svg::palette::style(&palette::PAINTS);
    for figure in little().iter().flat_map(|section| &section.figures) {
        let text = figure.alone(&palette::PAINTS);
        let document = parsed(&text);
        for class in attributes(&document, "class").into_iter().flat_map(|classes| classes.split(' ')) {
            // The style needs no rule for class `small`, because this is the default size of text.
            let known = class == "small" || style.contains(&format!(".{class}{{"));
            assert!(known, "{}: {class}", figure.id);
        }
    }
}

#[test]
fn figures_have_descriptions() {
    for Figure { id, title, description, .. } in little().iter().flat_map(|section| &section.figures) {
        assert!(
            !title.is_empty() && description.ends_with('.') && description.len() > 60,
            "{id}: {description}"
        );
    }
}

/// The number of thin lines with this paint in a figure. Traces are thin lines.
fn traces(figure: &str, paint: &str) -> usize {
    let figure =
        little().iter().flat_map(|section| &section.figures).find(|known| known.id == figure).unwrap();
    figure.drawing.body().matches(&format!("<path class=\"open thin stroke-{paint}\"")).count()
}

#[test]
fn the_book_s_figures_show_both_scenarios_and_the_switch_between_them() {
    // There is one trace for each of the 50 tasks, with round robin and with feedback.
    assert_eq!([traces("fig-20-1", "random"), traces("fig-20-1", "rocksteadier")], [50, 50]);
    let body = |id: &str| {
        let figures = little().iter().flat_map(|section| &section.figures);
        figures.clone().find(|figure| figure.id == id).unwrap().drawing.body().to_owned()
    };
    for (id, words) in [
        ("fig-20-1", ["round robin", "feedback", "seconds"]),
        ("fig-20-2", ["round robin", "feedback", "wasted"]),
        ("fig-20-6", ["structural weights", "switch", "seconds"]),
    ] {
        assert!(words.iter().all(|word| body(id).contains(word)), "{id}: {words:?}");
    }
    let bars = body("fig-20-2").matches("<rect").count();
    assert_eq!((bars, traces("fig-20-6", "rocksteadier")), (100, 50));
    assert!(body("fig-20-6").contains("line dashed stroke-ink"), "no dashed line marks the switch");
}

#[test]
fn the_aperture_section_begins_with_traces_of_a_mesh_and_of_random_apertures() {
    let section = little().iter().find(|section| section.id == "aperture").unwrap();
    assert_eq!(section.figures[0].id, "fig-rps-mesh");
    assert_eq!([traces("fig-rps-mesh", "deterministic"), traces("fig-rps-mesh", "random")], [31, 31]);
    let cells = row(little(), "aperture", "connections, full mesh to random aperture");
    assert_eq!(cells, ["over 99\u{a0}% fewer", "250,000 to 3,000, \u{2212}98.8\u{a0}%"]);
}

#[test]
fn labels_are_neither_cut_off_nor_overlapping() {
    // With this extent, the report has the text that readers of the page see.
    for figure in
        sections(Extent { trials: 3, load_seconds: 25, ..Extent::default() }, &ProgressBar::hidden())
            .iter()
            .flat_map(|section| &section.figures)
    {
        assert_eq!(figure.drawing.faults(), Vec::<String>::new(), "{}", figure.id);
    }
}

#[test]
fn tables_fit_on_a_phone() {
    // From the page's style: letters of 0.72rem with an average width of 0.62 of that, 0.4rem
    // between columns, and a page of 360 pixels without its margins.
    let (letter, between, most) = (16.0 * 0.72 * 0.62, 16.0 * 0.4, 360.0 - 32.0);
    for section in little() {
        let ReportSection { id, table, .. } = section;
        let widest = |column: usize| {
            let cells = table.rows.iter().chain([&table.head]).map(|row| row[column].as_str());
            // A line breaks at a space or after a hyphen, never at a no-break space.
            let words = cells.flat_map(|cell| cell.split([' ', '-']));
            let letters = words.map(|word| word.chars().count()).max().unwrap();
            f64::from(u32::try_from(letters).unwrap()) * letter
        };
        let width: f64 = (0..table.head.len()).map(|column| widest(column) + between).sum();
        assert!(width - between <= most, "{id}: {width}");
    }
}

#[test]
fn reports_are_reproducible_and_progress_reaches_its_end() {
    let bar = ProgressBar::hidden();
    assert!(files(&sections(LITTLE, &bar)) == files(little()));
    assert_eq!(bar.position(), steps(LITTLE));
}

/// The cells of the table row that begins with the cell `first`, without this cell.
fn row<'a>(sections: &'a [ReportSection], section: &str, first: &str) -> Vec<&'a str> {
    let section = sections.iter().find(|known| known.id == section).unwrap();
    let row = section.table.rows.iter().find(|row| row[0] == first).unwrap();
    row[1..].iter().map(String::as_str).collect()
}

#[test]
fn the_numbers_of_the_page_match_the_metrics() {
    let sections = little();
    let fleet = |algorithm, clients, backends, size| Fleet { algorithm, clients, backends, size, seed: 0 };

    let random = Spread::of_counts(&fleet(Algorithm::Random, 300, 300, 30).graph().connections());
    let cell = format!("{}\u{a0}({})", numbers::whole_percent(random.min / 30.0), random.min);
    assert_eq!(row(sections, "book", "20-4, fewest")[..2], ["50\u{a0}%\u{a0}(15)", cell.as_str()]);
    let even = ["100\u{a0}%\u{a0}(10)"; 2];
    assert_eq!(row(sections, "book", "20-5, most")[..2], even);

    let sweep = Sweep { size: 20, max: 40, seed: 0, weighted: false };
    let cells = sweep.run(Algorithm::Ringsteady, || {});
    let summary = Summary::of(cells.iter().map(|cell| cell.adjusted));
    let expected = [summary.mean, summary.p5, summary.min].map(numbers::utilization);
    assert_eq!(row(sections, "sweep", "ringsteady")[..3], expected);

    let [old, new] = [10, 11].map(|backends| {
        Fleet { seed: one_more::SEED, ..fleet(Algorithm::Deterministic, 10, backends, 4) }.graph()
    });
    let dropped = churn(&old, &new);
    let expected = [
        numbers::percent(dropped.mean),
        numbers::whole_percent(dropped.worst),
        format!("{} of 10", dropped.replaced),
    ];
    assert_eq!(row(sections, "one-more", "deterministic"), expected);

    let larger = (0..LITTLE.trials).map(|seed| {
        let [old, new] =
            [20, 21].map(|size| Fleet { seed, ..fleet(Algorithm::Deterministic, 100, 100, size) }.graph());
        churn(&old, &new).mean
    });
    assert_eq!(row(sections, "properties", "deterministic")[2], numbers::whole_percent(mean(larger)));
    assert_eq!(
        row(sections, "properties", "rocksteadier")[..4],
        ["0.0\u{a0}%", "0\u{a0}%", "0\u{a0}%", "0\u{a0}%"]
    );

    assert_eq!(row(sections, "aperture", "connections, random aperture"), ["~280K", "280,000"]);
    assert_eq!(row(sections, "aperture", "connections, deterministic aperture"), ["~25K", "25,000"]);

    let weighted = (1..).find(|&size| {
        let fleet = fleet(Algorithm::Rocksteadier, 300, 1_000, size);
        let graph = fleet.graph();
        raw_utilization(&Sharing::of(&fleet, &graph, true).loads(&graph)) >= 0.99
    });
    let cells = row(sections, "sizes", "300 on 1,000, rocksteadier, weighted");
    assert_eq!(cells[2], weighted.unwrap().to_string());

    // Every number of a table is in the page.
    let files = files(sections);
    for cell in sections.iter().flat_map(|section| section.table.rows.iter().flatten()) {
        assert!(files[0].1.contains(&escaped(cell)), "{cell}");
    }
}

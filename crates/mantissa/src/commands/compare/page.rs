//! HTML page of a comparison: which candidate loses least, bits against KL, all figures, and differences.

use mantissa_eval::verdict::Verdict;
use mantissa_jobs::{CompareReport, CompareRow};

use super::{against_best, by_text, conclusion, kl_text, measured_on, named, share, sizes};
use crate::output::{Align, Table, bytes, counted, number, sentence};
use crate::report::{Axis, Html, Page, Point, Reading, Scatter, gauge, table};

/// Makes the page.
pub(super) fn page(report: &CompareReport) -> Page {
    let measured: Vec<&CompareRow> = report.rows.iter().filter(|row| row.error.is_none()).collect();
    let mut page = Page::new(&format!(
        "mantissa compare: {} candidates for {}",
        report.rows.len(),
        report.model.display()
    ));
    page.push(Html::lead(&sentence(&conclusion(report))));
    let reading = |row: &&CompareRow| {
        let (kl, error) = (row.kl.unwrap_or(f64::NAN), row.kl_se.unwrap_or(f64::NAN));
        Reading { name: row.name.clone(), kl, verdict: Verdict::new((kl, error), (0.0, 0.0)) }
    };
    page.push(gauge(&measured.iter().map(reading).collect::<Vec<_>>(), 0.0));
    page.push(Html::element("p", &[("class", "note")], [Html::text(&measured_on(report))]));
    if let Some(note) = &report.note {
        page.push(Html::caution(note));
    }
    plot(&mut page, &measured);
    page.push(Html::heading("Candidates"));
    page.push(table("Bits, size and loss of every candidate", &candidates(report)));
    for row in report.rows.iter().filter(|row| row.error.is_some()) {
        page.push(Html::caution(&format!("{}: {}", row.name, row.error.as_deref().unwrap_or_default())));
    }
    if report.texts.len() > 1 {
        page.push(Html::heading("By text"));
        page.push(table("KL and top-1 agreement by text", &by_text(report)));
    }
    differences(&mut page, report);
    page
}

/// Appends the plot of bits against KL, for candidates of several sizes.
fn plot(page: &mut Page, measured: &[&CompareRow]) {
    let point = |row: &&CompareRow| {
        let (x, y) = (row.bits?, row.kl?);
        Some(Point { x, y, label: row.name.clone(), group: usize::from(row.quantize_seconds.is_none()) })
    };
    let points: Vec<Point> = measured.iter().filter_map(point).filter(|point| point.y > 0.0).collect();
    if points.len() < 2 {
        return;
    }
    let (x, y) = (Axis::linear("bits per weight"), Axis::log("KL (nats/token)"));
    let groups = ["recipe", "finished output"];
    let (title, styles, named) = ("KL against bits per weight", &[], None);
    let drawn = Scatter { title, x, y, groups: &groups, styles, named, points }.html();
    if let Some(drawn) = drawn {
        page.push(Html::heading("KL against bits per weight"));
        page.push(Html::paragraph(
            "Lower is better, further left is smaller. Named are those that no other beats in both.",
        ));
        page.push(drawn);
    }
}

/// Makes the table of all candidates, the smallest loss first; a phone cuts the last columns.
fn candidates(report: &CompareReport) -> Table {
    let mut table = Table::new([
        ("candidate", Align::Left),
        ("KL", Align::Right),
        ("to best", Align::Right),
        ("bits", Align::Right),
        ("size", Align::Right),
        ("top-1", Align::Right),
        ("time", Align::Right),
        ("loads in", Align::Left),
    ]);
    let mut rows: Vec<&CompareRow> = report.rows.iter().collect();
    rows.sort_by(|a, b| a.kl.unwrap_or(f64::INFINITY).total_cmp(&b.kl.unwrap_or(f64::INFINITY)));
    for row in rows {
        let [bits, size] = sizes(row);
        let to_best = if row.error.is_some() { "failed".to_owned() } else { against_best(report, row) };
        let time = format!("{:.1} s", row.seconds);
        let (kl, loads) = (kl_text(row.kl, row.kl_se), row.loads_in.join(", "));
        table.row([named(row), kl, to_best, bits, size, share(row.top1), time, loads]);
    }
    let dense = [report.model.display().to_string(), "0".to_owned(), String::new(), number(report.bits, 3)];
    table.row(dense.into_iter().chain([bytes(report.bytes), String::new(), String::new(), String::new()]));
    table
}

/// Appends the differences of all pairs.
fn differences(page: &mut Page, report: &CompareReport) {
    let Some(critical) = report.critical else { return };
    let mut pairs = Table::new([
        ("A", Align::Left),
        ("B", Align::Left),
        ("KL of A less B's", Align::Right),
        ("better", Align::Left),
    ]);
    for pair in &report.pairs {
        let difference =
            format!("{} ± {}", number(Some(pair.kl_difference), 3), number(Some(pair.kl_difference_se), 1));
        let better = pair.better.clone().unwrap_or_else(|| "may be chance".to_owned());
        pairs.row([pair.a.clone(), pair.b.clone(), difference, better]);
    }
    let said = format!(
        "Paired by window, so that what all candidates find hard does not count. One is called better if the difference is more \
         than {critical:.2} standard errors: by chance that happens in 5 of 100 such comparisons of {}.",
        counted(report.pairs.len() as u64, "pair")
    );
    page.push(Html::details(
        "Differences between candidates",
        [Html::paragraph(&said), table("Differences", &pairs)],
    ));
}

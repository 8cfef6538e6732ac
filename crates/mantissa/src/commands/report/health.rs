//! Tensor health over a run: an overview, the worst tensors, and curves of each.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use mantissa_jobs::json_lines;
use serde::Deserialize;

use crate::error::BadInput;
use crate::output::{Align, Table, number};
use crate::report::{Axis, Html, LineChart, Page, Series, table};

/// Maximum number of tensors shown.
const MAX_TENSORS: usize = 20_000;
/// Maximum number of steps with all tensors; beyond that, every second one is dropped.
const MAX_STEPS: usize = 200;
/// Number of tensors in the table of the worst.
const WORST: usize = 8;

/// Line of the telemetry.
#[derive(Deserialize)]
struct Line {
    step: u64,
    weights: Vec<Weight>,
    operands: Vec<Operand>,
}

#[derive(Deserialize)]
struct Weight {
    tensor: String,
    amax: Option<f64>,
    grad_amax: Option<f64>,
    underflowed: f64,
    saturated: f64,
    changed: f64,
    #[serde(default)]
    grad_norm: Option<f64>,
    #[serde(default)]
    update_ratio: Option<f64>,
}

#[derive(Deserialize)]
struct Operand {
    linear: String,
    operand: String,
    format: String,
    amax: Option<f64>,
    underflowed: f64,
    saturated: f64,
}

/// Health of a tensor at one step.
#[derive(Clone, Copy, Debug)]
struct Figures {
    step: u64,
    amax: f64,
    underflowed: f64,
    saturated: f64,
}

/// Health of one module: weight, bias and matmul operands.
#[derive(Default)]
struct Module {
    /// Figures by tensor, or by product, operand and format.
    figures: BTreeMap<String, Vec<Figures>>,
    /// Share of changed weights by tensor: step and share.
    changed: BTreeMap<String, Vec<(f64, f64)>>,
    /// Norm of the update over that of the weights by tensor.
    ratios: BTreeMap<String, Vec<(f64, f64)>>,
    /// Norm of the gradient by tensor.
    norms: BTreeMap<String, Vec<(f64, f64)>>,
}

/// All modules by name, in model order.
#[derive(Default)]
pub struct Health {
    order: Vec<String>,
    modules: BTreeMap<String, Module>,
    tensors: usize,
    steps: usize,
}

impl Health {
    /// Reads the telemetry at `path`; empty if the run has none.
    ///
    /// # Errors
    /// As [`json_lines::read`]; [`BadInput`] for too many tensors.
    pub fn read(path: &Path) -> Result<Self> {
        let mut health = Health::default();
        if !path.is_file() {
            return Ok(health);
        }
        let (mut every, mut seen) = (1, 0);
        json_lines::read(path, |line: Line| {
            seen += 1;
            if (seen - 1) % every != 0 {
                return Ok(());
            }
            if health.steps >= MAX_STEPS {
                health.halve();
                every *= 2;
                if (seen - 1) % every != 0 {
                    return Ok(());
                }
            }
            health.add(line);
            if health.tensors > MAX_TENSORS {
                let what = path.display().to_string();
                return Err(BadInput::new(what, "more tensors", format!("at most {MAX_TENSORS}")).into());
            }
            Ok(())
        })?;
        Ok(health)
    }

    fn add(&mut self, line: Line) {
        self.steps += 1;
        let step = line.step;
        for weight in line.weights {
            let (ratio, norm) = (weight.update_ratio, weight.grad_norm);
            let Weight { tensor, amax, grad_amax, underflowed, saturated, changed, .. } = weight;
            let name =
                tensor.strip_suffix(".weight").or(tensor.strip_suffix(".bias")).unwrap_or(&tensor).to_owned();
            let what = tensor.strip_prefix(&name).unwrap_or_default().trim_start_matches('.').to_owned();
            self.figures(
                &name,
                &what,
                Figures { step, amax: amax.unwrap_or(f64::NAN), underflowed, saturated },
            );
            let grad_amax = grad_amax.unwrap_or(f64::NAN);
            let gradient = Figures { step, amax: grad_amax, underflowed: f64::NAN, saturated: f64::NAN };
            self.figures(&name, &format!("gradient of {what}"), gradient);
            let module = self.modules.entry(name).or_default();
            let at = step as f64;
            for (curves, value) in [(&mut module.ratios, ratio), (&mut module.norms, norm)] {
                let curve = curves.entry(what.clone()).or_default();
                curve.extend(value.map(|value| (at, value)));
            }
            module.changed.entry(what).or_default().push((at, changed));
        }
        for operand in line.operands {
            let what = format!("{} ({})", operand.operand, operand.format);
            let amax = operand.amax.unwrap_or(f64::NAN);
            let Operand { linear, underflowed, saturated, .. } = operand;
            self.figures(&linear, &what, Figures { step, amax, underflowed, saturated });
        }
    }

    fn figures(&mut self, module: &str, what: &str, figures: Figures) {
        if !self.modules.contains_key(module) {
            self.order.push(module.to_owned());
        }
        let all = &mut self.modules.entry(module.to_owned()).or_default().figures;
        self.tensors += usize::from(!all.contains_key(what));
        all.entry(what.to_owned()).or_default().push(figures);
    }

    /// Drops every second step.
    fn halve(&mut self) {
        fn thin<T: Copy>(all: &mut Vec<T>) {
            *all = all.iter().step_by(2).copied().collect();
        }
        for module in self.modules.values_mut() {
            module.figures.values_mut().for_each(thin);
            for curves in [&mut module.changed, &mut module.ratios, &mut module.norms] {
                curves.values_mut().for_each(thin);
            }
        }
        self.steps = self.steps.div_ceil(2);
    }

    /// Appends the health section to `page`.
    pub fn show(&self, page: &mut Page) {
        if self.order.is_empty() {
            return;
        }
        page.push(Html::heading("Tensor health"));
        page.push(Html::paragraph(
            "Share of values that become 0 (underflow) or exceed the range (saturation) when rounded to their storage or matmul \
             dtype, and share of weights whose working copy an update changes. Without a master copy, unchanged weights do not \
             learn.",
        ));
        let (charts, zero) = parted(self.overview());
        page.push(Html::grid(charts));
        page.push(zero);
        if let Some(worst) = self.worst() {
            let title = "Tensors with the most underflow and saturation, last observed step";
            page.push(Html::subheading(title));
            page.push(table(title, &worst));
        }
        let modules = self.order.iter().filter_map(|name| Some((name, self.modules.get(name)?)));
        let modules = modules.map(|(name, module)| {
            let (charts, zero) = parted(module.charts());
            Html::details(name, [Html::grid(charts), zero])
        });
        page.push(Html::details(&format!("Curves of each module ({})", self.order.len()), modules));
    }

    /// Charts the minimum, median and maximum over all tensors per step.
    fn overview(&self) -> Vec<LineChart<'static>> {
        let modules = || self.modules.values();
        let changed = modules().flat_map(|module| module.changed.values().flatten().copied());
        let of = |get: fn(&Figures) -> f64| {
            let all = modules().flat_map(|module| module.figures.values().flatten());
            all.map(move |figures| (figures.step as f64, get(figures))).collect::<Vec<_>>()
        };
        let ratios = modules().flat_map(|module| module.ratios.values().flatten().copied());
        let ratios = spread("Update / weight", ratios.collect());
        let norms = modules().flat_map(|module| module.norms.values().flatten().copied());
        let norms = spread("Gradient norm of each tensor", norms.collect());
        vec![
            LineChart { y: Axis::log("ratio of norms"), ..ratios },
            LineChart { y: Axis::log("norm"), ..norms },
            spread("Weights changed by an update", changed.collect()),
            spread("Underflow", of(|figures| figures.underflowed)),
            spread("Saturation", of(|figures| figures.saturated)),
        ]
    }

    /// Makes the table of the tensors with the most underflow and saturation at the last step; `None` if no tensor has
    /// any.
    fn worst(&self) -> Option<Table> {
        let columns = ["tensor", "amax", "underflow", "saturation"];
        let sides = [Align::Left, Align::Right, Align::Right, Align::Right];
        let mut worst = Table::new(columns.into_iter().zip(sides).collect::<Vec<_>>());
        let named = self.order.iter().filter_map(|name| Some((name, self.modules.get(name)?)));
        let lost = |figures: &Figures| figures.underflowed + figures.saturated;
        let mut all: Vec<_> = named
            .flat_map(|(name, module)| {
                module
                    .figures
                    .iter()
                    .filter_map(move |(what, all)| Some((format!("{name}: {what}"), *all.last()?)))
            })
            .filter(|(_, figures)| lost(figures) > 0.0)
            .collect();
        all.sort_by(|a, b| lost(&b.1).total_cmp(&lost(&a.1)));
        for (name, figures) in all.into_iter().take(WORST) {
            let Figures { amax, underflowed, saturated, .. } = figures;
            worst.row([name, number(Some(amax), 4), percent(underflowed), percent(saturated)]);
        }
        (!worst.rows().is_empty()).then_some(worst)
    }
}

impl Module {
    fn charts(&self) -> Vec<LineChart<'static>> {
        let series = |get: fn(&Figures) -> f64| {
            let lines = self.figures.iter().map(|(what, all)| {
                let points = all.iter().map(|figures| (figures.step as f64, get(figures)));
                Series::new(what.clone(), points.collect())
            });
            lines.filter(|series| series.points.iter().any(|point| point.1.is_finite())).collect::<Vec<_>>()
        };
        let chart = |title: &'static str, y, series: Vec<Series>| LineChart { title, x: STEP, y, series };
        let curves = |of: &BTreeMap<String, Vec<(f64, f64)>>| {
            let known = of.iter().filter(|(_, points)| !points.is_empty());
            known.map(|(what, points)| Series::new(what.clone(), points.clone())).collect::<Vec<_>>()
        };
        let changed = curves(&self.changed);
        let mut charts = vec![
            chart("Largest magnitude", Axis::log("amax"), series(|figures| figures.amax)),
            chart("Underflow", SHARE, series(|figures| figures.underflowed)),
            chart("Saturation", SHARE, series(|figures| figures.saturated)),
        ];
        if !changed.is_empty() {
            charts.push(chart("Weights changed by an update", SHARE, changed));
        }
        for (title, axis, of) in [
            ("Update / weight", Axis::log("ratio of norms"), &self.ratios),
            ("Gradient norm", Axis::log("norm"), &self.norms),
        ] {
            let series = curves(of);
            if !series.is_empty() {
                charts.push(chart(title, axis, series));
            }
        }
        charts
    }
}

/// Horizontal axis of a run.
pub const STEP: Axis = Axis::linear("step").in_full();
const SHARE: Axis = Axis::from_zero("share");

/// Charts the minimum, median and maximum of the values per step.
fn spread(title: &'static str, points: Vec<(f64, f64)>) -> LineChart<'static> {
    let mut by_step: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for (step, value) in points.into_iter().filter(|point| point.1.is_finite()) {
        by_step.entry(step as u64).or_default().push(value);
    }
    by_step.values_mut().for_each(|values| values.sort_by(f64::total_cmp));
    let line = |name: &str, at: fn(usize) -> usize| {
        let points =
            by_step.iter().filter_map(|(step, values)| Some((*step as f64, *values.get(at(values.len()))?)));
        Series::new(name, points.collect())
    };
    let series = vec![line("maximum", |n| n - 1), line("median", |n| n / 2), line("minimum", |_| 0)];
    LineChart { title, x: STEP, y: SHARE, series }
}

/// Draws the charts that show something; those of zeros alone are named in one sentence.
fn parted(charts: Vec<LineChart<'_>>) -> (Vec<Html>, Html) {
    let is_zero = |chart: &LineChart<'_>| chart.series.iter().all(Series::is_zero);
    let (zero, shown): (Vec<_>, Vec<_>) = charts.into_iter().partition(is_zero);
    // A chart without any value is not worth a word either.
    let finite = |chart: &&LineChart<'_>| {
        chart.series.iter().flat_map(|series| &series.points).any(|point| point.1.is_finite())
    };
    let names: Vec<_> = zero.iter().filter(finite).map(|chart| chart.title.to_lowercase()).collect();
    let sentence = match names.as_slice() {
        [] => Html::default(),
        names => Html::paragraph(&format!("0 at every observed step: {}.", names.join(", "))),
    };
    (shown.iter().filter_map(LineChart::html).collect(), sentence)
}

fn percent(share: f64) -> String {
    format!("{} %", number(Some(100.0 * share), 3))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_is_thinned_and_shown() {
        let temp = tempfile::TempDir::new().unwrap();
        let path = temp.path().join("telemetry.jsonl");
        let line = |step: u64| {
            format!(
                "{{\"step\":{step},\"weights\":[{{\"tensor\":\"a<b.weight\",\"amax\":1.5,\"grad_amax\":null,\"underflowed\":0.0,\
                 \"saturated\":0.0,\"changed\":0.25}}],\"operands\":[{{\"linear\":\"a<b\",\"operand\":\"dgrad dy\",\"format\":\"f16\",\
                 \"amax\":0.1,\"underflowed\":0.5,\"saturated\":0.0}}]}}\n"
            )
        };
        std::fs::write(&path, (1..=1000).map(line).collect::<String>()).unwrap();
        let health = Health::read(&path).unwrap();
        let kept = &health.modules["a<b"].figures["dgrad dy (f16)"];
        assert!((100..=MAX_STEPS).contains(&kept.len()), "{}", kept.len());
        let gaps: Vec<_> = kept.windows(2).map(|pair| pair[1].step - pair[0].step).collect();
        assert!(gaps.iter().all(|gap| *gap == gaps[0]) && kept[0].step == 1, "{gaps:?}");
        let mut page = Page::new("t");
        health.show(&mut page);
        let html = page.html();
        assert!(
            html.contains("<summary>a&lt;b</summary>") && html.contains("a&lt;b: dgrad dy (f16)"),
            "{html}"
        );
        assert!(html.contains("50 %"), "{html}");
        assert!(html.contains("<summary>Curves of each module (1)</summary><details>"), "{html}");
        // Nothing saturates: a sentence, and no chart of zeros.
        assert!(html.contains("0 at every observed step: saturation."), "{html}");
        assert!(!html.contains("<figcaption>Saturation"), "{html}");
    }

    #[test]
    fn tensors_without_underflow_and_saturation_are_not_listed() {
        let temp = tempfile::TempDir::new().unwrap();
        let path = temp.path().join("telemetry.jsonl");
        let shown = |underflowed: f64| {
            let weight = |name: &str, underflowed: f64| {
                format!(
                    "{{\"tensor\":\"{name}.weight\",\"amax\":1.5,\"grad_amax\":null,\"underflowed\":{underflowed},\
                     \"saturated\":0.0,\"changed\":0.25}}"
                )
            };
            let weights = [weight("a", underflowed), weight("b", 0.0)].join(",");
            std::fs::write(&path, format!("{{\"step\":1,\"weights\":[{weights}],\"operands\":[]}}\n"))
                .unwrap();
            let mut page = Page::new("t");
            Health::read(&path).unwrap().show(&mut page);
            page.html()
        };
        let html = shown(0.5);
        assert!(html.contains("a: weight</th>") && !html.contains("b: weight</th>"), "{html}");
        assert!(html.contains("most underflow and saturation"), "{html}");
        assert!(!shown(0.0).contains("most underflow"), "a table of zeros says nothing");
    }

    #[test]
    fn a_run_without_telemetry_has_no_section() {
        let mut page = Page::new("t");
        let before = page.html();
        Health::read(Path::new("/nowhere/telemetry.jsonl")).unwrap().show(&mut page);
        assert_eq!(page.html(), before);
    }
}

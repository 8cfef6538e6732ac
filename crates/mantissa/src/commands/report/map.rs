//! Layer × module maps of a quantized model: error and bits of every quantized weight.

use std::collections::BTreeMap;

use mantissa_quant::LayerReport;

use crate::output::number;
use crate::report::{Cell, Heat, Html};

/// Place of a module in the map.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    /// Index of the layer; `None` for a module outside the layers, such as the head.
    layer: Option<usize>,
    /// Name within the layer, with `*` for the index of an expert.
    module: String,
}

/// Splits a module name into the index of its layer, if it has one, and its name within the layer.
pub fn place(name: &str) -> (Option<usize>, String) {
    let Place { layer, module } = split(name);
    (layer, module)
}

/// Splits a module name at its first index, the layer; further ones are those of experts.
fn split(name: &str) -> Place {
    let parts: Vec<&str> = name.split('.').collect();
    let Some(at) = parts.iter().position(|part| part.parse::<usize>().is_ok()) else {
        return Place { layer: None, module: name.to_owned() };
    };
    let inner = parts[at + 1..].iter().map(|part| if part.parse::<usize>().is_ok() { "*" } else { part });
    Place { layer: parts[at].parse().ok(), module: inner.collect::<Vec<_>>().join(".") }
}

/// Returns short column names: the last part without `_proj`, if no two columns share it, else the full name.
pub fn short(modules: &[String]) -> Vec<String> {
    let last = |name: &String| {
        let last = name.rsplit('.').next().unwrap_or(name);
        last.strip_suffix("_proj").unwrap_or(last).to_owned()
    };
    let names: Vec<_> = modules.iter().map(last).collect();
    let unique = |i: usize| names.iter().filter(|name| **name == names[i]).count() == 1;
    (0..modules.len()).map(|i| if unique(i) { names[i].clone() } else { modules[i].clone() }).collect()
}

/// Value of a map, from the report of a layer.
type Value = fn(&LayerReport) -> f64;

/// Map over the layers of a model.
struct Map<'a> {
    label: &'a str,
    value: Value,
    /// Number of decimals of all cells, from their values.
    decimals: fn(&[f64]) -> usize,
    /// True if the largest value has a frame.
    framed: bool,
}

impl Map<'_> {
    /// Renders the map, with a line for the modules outside the layers. Of several experts, the largest value
    /// is shown.
    fn html(&self, layers: &[LayerReport]) -> Option<Html> {
        let (mut modules, mut cells, mut outside) = (Vec::new(), BTreeMap::new(), Vec::new());
        let decimals = (self.decimals)(&layers.iter().map(self.value).collect::<Vec<_>>());
        for layer in layers {
            let (Place { layer: index, module }, value) = (split(&layer.module), (self.value)(layer));
            let cell = Cell {
                value,
                text: format!("{value:.decimals$}"),
                title: format!("{}: {} ({})", layer.module, number(Some(value), 4), layer.scheme),
            };
            let Some(index) = index else {
                outside.push(format!("{} {}", module, cell.text));
                continue;
            };
            if !modules.contains(&module) {
                modules.push(module.clone());
            }
            let worst: &mut Cell = cells.entry((index, module)).or_insert_with(|| cell.clone());
            if cell.value > worst.value {
                *worst = cell;
            }
        }
        let mut html = self.heat(&modules, &cells).html()?;
        if !outside.is_empty() {
            html.push(Html::paragraph(&format!("Outside the layers: {}.", outside.join(", "))));
        }
        Some(html)
    }

    fn heat(&self, modules: &[String], cells: &BTreeMap<(usize, String), Cell>) -> Heat<'_> {
        let mut indices: Vec<usize> = cells.keys().map(|(index, _)| *index).collect();
        indices.dedup();
        let row = |index: usize| {
            let cells = modules.iter().map(|module| cells.get(&(index, module.clone())).cloned());
            (index.to_string(), cells.collect())
        };
        Heat {
            label: self.label,
            corner: "layer",
            columns: short(modules).into_iter().zip(modules.iter().cloned()).collect(),
            rows: indices.into_iter().map(row).collect(),
            framed: self.framed,
        }
    }
}

/// Renders the relative error of every weight in percent, by layer and module.
pub fn errors(layers: &[LayerReport]) -> Option<Html> {
    let map = Map {
        label: "Relative error of each quantized weight in percent, by layer and module",
        value: |layer| 100.0 * layer.error.relative_error,
        decimals: |values| {
            let largest = values.iter().copied().filter(|value| value.is_finite()).fold(0.0, f64::max);
            // Three significant digits of the largest.
            (2 - largest.max(1e-4).log10().floor() as i32).max(0) as usize
        },
        framed: true,
    };
    map.html(layers)
}

/// Returns the bits per weight of a layer: as stored, if known.
pub fn bits_of(layer: &LayerReport) -> f64 {
    layer.stored_bits_per_weight.unwrap_or(layer.bits_per_weight)
}

/// Difference of bits per weight below which layers count as equal: it comes from the metadata of small tensors.
const SAME_BITS: f64 = 0.05;

/// Returns the least and the most bits per weight of the layers.
pub fn bits_range(layers: &[LayerReport]) -> Option<(f64, f64)> {
    let bits = || layers.iter().map(bits_of);
    Some((bits().min_by(f64::total_cmp)?, bits().max_by(f64::total_cmp)?))
}

/// Renders the bits per weight by layer and module; `None` if all are the same.
pub fn bits(layers: &[LayerReport]) -> Option<Html> {
    let decimals = |values: &[f64]| {
        let exact = |n: &i32| {
            let whole = |bits: &f64| (bits * 10f64.powi(*n)).fract() == 0.0;
            values.iter().all(whole)
        };
        // Stored bits, with the metadata of tensors, are no short number: hundredths of them do.
        (0..=3).find(exact).unwrap_or(2) as usize
    };
    let (least, most) = bits_range(layers)?;
    if most - least < SAME_BITS {
        return None;
    }
    let label = "Bits per weight of each quantized weight, by layer and module";
    Map { label, value: bits_of, decimals, framed: false }.html(layers)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mantissa_quant::ErrorReport;

    fn layer(module: &str, error: f64, bits: f64) -> LayerReport {
        LayerReport {
            module: module.to_owned(),
            scheme: "int4-g128".to_owned(),
            method: "rtn".to_owned(),
            fallback: None,
            scale_dtype: "f16".to_owned(),
            shape: [8, 8],
            bits_per_weight: bits,
            stored_bits_per_weight: None,
            outliers: None,
            output_error: None,
            judged: None,
            notes: Vec::new(),
            error: ErrorReport { mse: 0.0, sqnr_db: None, relative_error: error, max_abs_error: 0.0 },
        }
    }

    #[test]
    fn names_are_split_at_their_layer() {
        let split = place;
        assert_eq!(split("model.layers.12.self_attn.q_proj"), (Some(12), "self_attn.q_proj".to_owned()));
        assert_eq!(split("transformer.h.0.attn.c_attn"), (Some(0), "attn.c_attn".to_owned()));
        assert_eq!(
            split("model.layers.3.mlp.experts.17.up_proj"),
            (Some(3), "mlp.experts.*.up_proj".to_owned())
        );
        assert_eq!(split("lm_head"), (None, "lm_head".to_owned()));
    }

    #[test]
    fn columns_are_short_where_that_is_unique() {
        let names = ["self_attn.q_proj", "mlp.up_proj", "mlp.experts.*.up_proj"].map(str::to_owned);
        assert_eq!(short(&names), ["q", "mlp.up_proj", "mlp.experts.*.up_proj"]);
    }

    #[test]
    fn a_map_has_a_cell_for_every_module_and_the_worst_expert() {
        let layers = [
            layer("model.layers.0.self_attn.q_proj", 0.07, 4.125),
            layer("model.layers.10.self_attn.q_proj", 0.08, 4.125),
            layer("model.layers.10.mlp.experts.0.up_proj", 0.01, 4.125),
            layer("model.layers.10.mlp.experts.1.up_proj", 0.09, 4.125),
            layer("lm_head", 0.02, 4.125),
        ];
        let html = errors(&layers).unwrap();
        let html = html.as_str();
        assert!(
            html.contains("title=\"model.layers.10.mlp.experts.1.up_proj: 9 (int4-g128)\">9.00</td>"),
            "{html}"
        );
        assert!(
            !html.contains("experts.0.up_proj") && html.contains("Outside the layers: lm_head 2.00."),
            "{html}"
        );
        assert_eq!(html.matches("scope=\"row\"").count(), 2);
        assert_eq!(bits(&layers), None, "a map of equal bits says nothing");
        let mixed = [layers[0].clone(), layer("model.layers.1.self_attn.q_proj", 0.01, 8.5)];
        let mixed = bits(&mixed).unwrap();
        // The same number of decimals in all cells.
        assert!(
            mixed.as_str().contains(">8.500</td>") && mixed.as_str().contains(">4.125</td>"),
            "{mixed:?}"
        );
        assert_eq!((errors(&[]), bits(&[])), (None, None));
    }
}

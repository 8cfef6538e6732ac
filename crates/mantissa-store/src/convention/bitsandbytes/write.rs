//! Codes and scales → tensors of a module, and the `quantization_config` that describes them.

use mantissa_num::codebook::Book;
use mantissa_num::pack::Packing;
use mantissa_num::{Blocks, Codes, Format, Quantized, Rule, Scheme};
use serde_json::{Value, json};

use super::config::{BitWidth, QUANT_METHOD};
use super::scheme::{BLOCK_SIZES, BOOKS, INT8_LEVELS, NESTED_BLOCK, int8_input, int8_weight};
use crate::convention::{
    LinearPlan, LinearWeight, ModuleGroup, NamedBytes, NotStorable, Storable, StoredTensors, Weight,
};
use crate::{Dtype, TensorSpec};

/// Default threshold: input values of at least this magnitude are not quantized.
const THRESHOLD: f32 = 6.0;

/// Bytes reserved in the JSON of double quantization for the mean of the scales: the longest shortest text of any f32
/// as a double. A tensor's size is declared before its values are known, and JSON may end in spaces.
const MEAN_WIDTH: usize = 26;

/// Storage of a scheme.
struct Layout {
    kind: BitWidth,
    /// The code book, its name and its block.
    table: Option<(Book, &'static str, u32)>,
    doubled: bool,
}

fn layout(scheme: &Scheme, input: Option<&Scheme>) -> Storable<Layout> {
    let no = |why: String| Err(NotStorable { scheme: scheme.to_string(), why });
    if let Format::Table(table) = &scheme.format {
        let book = BOOKS.iter().find(|(book, _)| *book == table.book);
        let Some(&(book, name)) = book else {
            return no("bitsandbytes stores weights as nf4, fp4-bnb or int8-channel:restricted".to_owned());
        };
        let size = match table.blocks {
            Blocks::Flat(size) if BLOCK_SIZES.contains(&size) => size,
            _ => return no(format!("bitsandbytes has blocks of {BLOCK_SIZES:?}")),
        };
        if input.is_some() {
            return no("bitsandbytes does not quantize the inputs of 4-bit weights".to_owned());
        }
        let doubled = match table.scale.nested() {
            None => false,
            Some((Blocks::Flat(NESTED_BLOCK), _)) => true,
            Some(_) => return no(format!("bitsandbytes nests scales in blocks of {NESTED_BLOCK}")),
        };
        return Ok(Layout { kind: BitWidth::FourBit, table: Some((book, name, size)), doubled });
    }
    if scheme.format != int8_weight().format {
        return no("bitsandbytes stores weights as nf4, fp4-bnb or int8-channel:restricted".to_owned());
    }
    if scheme.encoder.rule != Rule::Restricted {
        return no(
            "bitsandbytes stores a row's amax, 127 times the scale; use int8-channel:restricted".to_owned()
        );
    }
    if input != Some(&int8_input()) {
        return no("LLM.int8() quantizes the inputs as well: add +int8-token:restricted".to_owned());
    }
    Ok(Layout { kind: BitWidth::EightBit, table: None, doubled: false })
}

/// Tensors of a quantized linear layer.
///
/// # Errors
/// [`NotStorable`] if the format cannot hold the scheme.
pub fn specs(plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
    let layout = layout(plan.scheme, plan.input)?;
    let LinearPlan { module, scheme, rows, cols, .. } = *plan;
    let spec =
        |suffix: &str, dtype, shape: Vec<usize>| TensorSpec::new(format!("{module}.{suffix}"), dtype, shape);
    let Some((book, name, _)) = layout.table else {
        return Ok(vec![
            spec("weight", Dtype::I8, vec![rows, cols]),
            spec("SCB", Dtype::F32, vec![rows]),
            spec("weight_format", Dtype::U8, Vec::new()),
        ]);
    };
    let blocks = scheme.format.blocks().count(rows, cols);
    let absmax = if layout.doubled { Dtype::U8 } else { Dtype::F32 };
    let mut all = vec![
        spec("weight", Dtype::U8, vec![Packing::bitsandbytes().total_bytes(rows, cols), 1]),
        spec("weight.absmax", absmax, vec![blocks]),
    ];
    if layout.doubled {
        let nested = Blocks::Flat(NESTED_BLOCK).count(1, blocks);
        all.push(spec("weight.nested_absmax", Dtype::F32, vec![nested]));
        all.push(spec("weight.nested_quant_map", Dtype::F32, vec![Book::Dyn8.levels().len()]));
    }
    all.push(spec("weight.quant_map", Dtype::F32, vec![book.levels().len()]));
    let state = state(&layout, rows, cols, layout.doubled.then_some(0.0));
    all.push(spec(&format!("weight.quant_state.bitsandbytes__{name}"), Dtype::U8, vec![state.len()]));
    Ok(all)
}

/// Bytes of the tensors declared by [`specs`], by name.
///
/// # Errors
/// As [`specs`].
pub fn tensors(plan: &LinearPlan<'_>, q: &Quantized) -> Storable<NamedBytes> {
    let layout = layout(plan.scheme, plan.input)?;
    let name = |suffix: &str| format!("{}.{suffix}", plan.module);
    let Codes::U8(codes) = &q.codes else { return Ok(Vec::new()) };
    let Some((book, book_name, _)) = layout.table else {
        let amax = (0..q.scales.len()).map(|i| row_amax(f32::from_bits(q.scales.get(i))));
        return Ok(vec![
            (name("weight"), codes.clone()),
            (name("SCB"), amax.flat_map(f32::to_le_bytes).collect()),
            (name("weight_format"), vec![0]),
        ]);
    };
    let packed = Packing::bitsandbytes().pack(codes, q.cols);
    let mut all = vec![(name("weight"), packed), (name("weight.absmax"), q.scales.to_le_bytes())];
    if let Some(nested) = q.nested() {
        all.push((name("weight.nested_absmax"), floats(&nested.factors())));
        all.push((name("weight.nested_quant_map"), floats(Book::Dyn8.levels())));
    }
    all.push((name("weight.quant_map"), floats(book.levels())));
    let state = state(&layout, q.rows, q.cols, q.nested().map(|nested| nested.mean));
    all.push((name(&format!("weight.quant_state.bitsandbytes__{book_name}")), state));
    Ok(all)
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// An amax that gives `scale` when divided by 127. Just below a power of two, two neighbouring values do; the result
/// may be the other one, and the weight is the same.
fn row_amax(scale: f32) -> f32 {
    let near = scale * INT8_LEVELS;
    let exact = [near, near.next_down(), near.next_up()].into_iter().find(|amax| amax / INT8_LEVELS == scale);
    exact.unwrap_or(near)
}

/// The JSON of a quantization state, spaced as Python spaces it.
fn state(layout: &Layout, rows: usize, cols: usize, mean: Option<f32>) -> Vec<u8> {
    let (name, size) = layout.table.map_or(("", 0), |(_, name, size)| (name, size));
    let mut text = format!(
        "{{\"quant_type\": \"{name}\", \"blocksize\": {size}, \"dtype\": \"float32\", \"shape\": [{rows}, {cols}]"
    );
    let Some(mean) = mean else { return (text + "}").into_bytes() };
    text += &format!(
        ", \"nested_blocksize\": {NESTED_BLOCK}, \"nested_dtype\": \"float32\", \"nested_offset\": "
    );
    let width = text.len() + MEAN_WIDTH;
    text += &json!(f64::from(mean)).to_string();
    text += "}";
    format!("{text:width$}").into_bytes()
}

/// Tensors of a layer as it was read.
///
/// # Errors
/// [`NotStorable`] if the format cannot hold all parts.
pub fn store(module: &str, layer: &LinearWeight) -> Storable<StoredTensors> {
    let Weight::Quantized(q) = &layer.weight else { return Ok(Vec::new()) };
    let mut scheme = Scheme::new(q.format.clone(), Rule::Amax);
    if scheme.format == int8_weight().format {
        // Scales that are not a row's amax over 127 would change.
        let exact = (0..q.scales.len()).map(|i| f32::from_bits(q.scales.get(i)));
        if exact.clone().all(|scale| row_amax(scale) / INT8_LEVELS == scale) {
            scheme.encoder.rule = Rule::Restricted;
        }
    }
    if !layer.transforms.is_empty() {
        let why = format!("{module}: bitsandbytes stores no side tensors");
        return Err(NotStorable { scheme: scheme.to_string(), why });
    }
    let input = layer.input.as_ref().map(|input| &input.scheme);
    let plan = LinearPlan::new(module, &scheme, input, (layer.rows, layer.cols));
    let bytes = tensors(&plan, q)?.into_iter().map(|(_, bytes)| bytes);
    Ok(specs(&plan)?.into_iter().zip(bytes).collect())
}

/// `quantization_config` for modules of one scheme, and the unquantized modules `kept`, the head included.
///
/// # Errors
/// [`NotStorable`] if schemes differ, because the config has one for the whole model.
pub fn quantization_config(groups: &[ModuleGroup], kept: &[String]) -> Storable<Value> {
    let mut layouts = Vec::new();
    for (scheme, input, modules) in groups {
        let layout = layout(scheme, input.as_ref())?;
        let same = |first: &Layout| (first.kind, first.doubled) == (layout.kind, layout.doubled);
        if layouts.first().is_some_and(|first| !same(first)) {
            let module = modules.first().map_or("", String::as_str);
            let why = format!("{module}: bitsandbytes has one kind of weight for the model");
            return Err(NotStorable { scheme: scheme.to_string(), why });
        }
        layouts.push(layout);
    }
    let first = layouts.first();
    let four = first.is_none_or(|layout| layout.kind == BitWidth::FourBit);
    Ok(json!({
        "quant_method": QUANT_METHOD,
        "_load_in_4bit": four,
        "_load_in_8bit": !four,
        "load_in_4bit": four,
        "load_in_8bit": !four,
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": first.and_then(|layout| layout.table).map_or("fp4", |(_, name, _)| name),
        "bnb_4bit_use_double_quant": first.is_some_and(|layout| layout.doubled),
        "llm_int8_enable_fp32_cpu_offload": false,
        "llm_int8_has_fp16_weight": false,
        "llm_int8_skip_modules": kept,
        "llm_int8_threshold": THRESHOLD,
    }))
}

//! Verification of a GGUF file with [`mantissa_verify::gguf`].

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use mantissa_kernels::{give_back_memory, kernels, map_reduce_fixed};
use mantissa_model::config::DenseMlp;
use mantissa_model::{LoadError, ModelConfig, Role, TensorInfo, Tokenizer, WeightSource, load_config};
use mantissa_num::Quantized;
use mantissa_store::convention::gguf::{self, Architecture, Stored, place};
use mantissa_store::convention::{LinearWeight, ModelFiles, Weight};
use mantissa_store::{Error, ErrorClass, regular};
use mantissa_verify::gguf::{BlockType, GgufFile, Key, Model, Place, Tensor};
use serde_json::Value;

use super::logits::compare_readers;
use super::reference::reference_fault;
use super::worst::{Rows, worst_of_row};
use crate::dequantize::Dequantizer;
use crate::error::{QuantError, Result};
use crate::fold::Folded;
use crate::gguf::{linear_of, parameters};
use crate::quality::Verification;
use crate::source::{DenseError, DenseTensor, PANEL, Scratch, WeightReader};

/// Tensors of rotary factors; their values are part of the configuration.
const ROPE_FACTORS: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// Checks container, tensors and logits of the opened GGUF model `files`; `bounded` as in [`super::verify`].
///
/// # Errors
/// [`QuantError`] if a file cannot be read.
pub(super) fn check(
    files: &ModelFiles,
    source: Option<&ModelFiles>,
    bounded: bool,
    threads: usize,
    found: &mut Verification,
) -> Result<()> {
    let open = |path| Ok((path, regular::open(path, "a .gguf file")?));
    let opened = files.checkpoint().files().map(open).collect::<Result<_>>()?;
    let file = match GgufFile::read_all(opened) {
        Ok(file) => file,
        Err(error) => match store_error(files.dir(), error) {
            error if error.class() == ErrorClass::Input => {
                found.faults.push(format!("independent reader: {error}"));
                return Ok(());
            }
            error => return Err(error.into()),
        },
    };
    let mut config = load_config(files)?;
    if !same_container(files, &file, found) {
        // Without the same tensors in both readers nothing else can be compared.
        return Ok(());
    }
    check_keys(&file, found);
    if let Some(source) = source {
        let theirs = load_config(source)?;
        check_config(&config, &theirs, found);
        compare_tokenizers(files, source, found);
        // The file is read under any of a model's names, the source under its own.
        config = config.named_as(&theirs);
    }
    let model = independent(file);
    let file = &model.file;
    note_unknown(&model, &config, found);
    let weighed = file.text("quantize.imatrix.file").is_some();
    for info in parameters(&config) {
        let config = &config;
        let check = TensorCheck { files, model: &model, source, config, info: &info, bounded, weighed };
        check.run(threads, found)?;
    }
    let opaque: Vec<_> = file.tensors.iter().filter(|(_, tensor)| !tensor.ty.is_decoded()).collect();
    if let Some((name, tensor)) = opaque.first() {
        let (n, ty) = (opaque.len(), tensor.ty);
        found.notes.push(format!(
            "{n} tensors (first: {name}, {ty:?}) have a type that only one reader decodes: neither they nor logits were compared"
        ));
        return Ok(());
    }
    compare_readers(files, &Independent { files, model: &model }, &config, found)
}

/// Compares the tokenizer of the file with that of its source on probe texts. One that cannot be read is reported by what needs it.
fn compare_tokenizers(files: &ModelFiles, source: &ModelFiles, found: &mut Verification) {
    let path = |files: &ModelFiles| match files.gguf() {
        Some(gguf) => gguf.metadata().path().to_owned(),
        None => files.dir().to_owned(),
    };
    // One after the other: either may take more memory than a layer.
    let probes = Tokenizer::load(&path(source)).and_then(|theirs| theirs.probes());
    give_back_memory();
    let Ok(probes) = probes else { return };
    let found_by = Tokenizer::load(&path(files)).and_then(|ours| ours.first_difference_from(probes));
    give_back_memory();
    if let Ok(Some(difference)) = found_by {
        found.notes.push(format!("the tokenizer encodes other tokens than the source's: {difference}"));
    }
}

/// Checks that both readers find the same tensors at the same offsets.
fn same_container(files: &ModelFiles, file: &GgufFile, found: &mut Verification) -> bool {
    let before = found.faults.len();
    let ordinary = files.gguf().map_or(&[][..], |model| model.tensors());
    if ordinary.len() != file.tensors.len() {
        let (a, b) = (file.tensors.len(), ordinary.len());
        found.faults.push(format!("independent reader {a} tensors, ordinary reader {b}"));
    }
    for theirs in ordinary {
        let dims: Vec<u64> = theirs.shape.iter().rev().map(|&n| n as u64).collect();
        let ours = file.tensors.get(&theirs.name);
        let number = ours.map_or(0, |ours| ours.file);
        let ty = BlockType::from_id(theirs.ty.id);
        let theirs_is =
            ty.map(|ty| Tensor { ty, file: number, dims, start: theirs.offset, bytes: theirs.len });
        // The offset of a tensor without elements does not matter.
        let same =
            ours.is_some_and(|ours| Some(ours) == theirs_is.as_ref() || (ours.bytes, theirs.len) == (0, 0));
        if !same {
            found
                .faults
                .push(format!("{}: independent reader {ours:?}, ordinary reader {theirs_is:?}", theirs.name));
        }
    }
    found.faults.len() == before
}

/// Checks keys that llama.cpp uses without comparing them with tensors.
fn check_keys(file: &GgufFile, found: &mut Verification) {
    let blocks = file.tensors.iter().find(|(_, t)| t.ty.is_blocks());
    if let (Some((name, tensor)), version) = (blocks, file.number("general.quantization_version"))
        && version != Some(2)
    {
        let version = version.map_or("none".to_owned(), |v| v.to_string());
        found.faults.push(format!(
            "general.quantization_version: expected 2 for blocks such as those of {name} ({:?}), got {version}",
            tensor.ty
        ));
    }
    let vocabulary = file.tensors.get("token_embd.weight").map(Tensor::rows);
    if let (Some(Key::List(tokens)), Some(rows)) = (file.keys.get("tokenizer.ggml.tokens"), vocabulary)
        && *tokens != rows
    {
        found.faults.push(format!(
            "tokenizer.ggml.tokens: expected {rows} tokens, the rows of token_embd.weight, got {tokens}"
        ));
    }
}

/// Notes tensors that the model does not use.
fn note_unknown(model: &Model<'_>, config: &ModelConfig, found: &mut Verification) {
    let mut known = BTreeSet::new();
    for info in parameters(config) {
        known.extend(model.place(&info.name).map(|place| place.tensor));
        known.extend(model.parts(&info.name).into_iter().flat_map(|parts| parts.names().to_vec()));
    }
    // Required by a loader, and read by nothing.
    known.extend(config.unread().iter().filter_map(|(name, _)| Some(model.place(name)?.tensor)));
    let unknown = |name: &&String| {
        let weight = name.strip_suffix(".scale").map(|module| format!("{module}.weight"));
        let used = |name: &String| known.contains(name);
        !used(name) && !weight.is_some_and(|weight| used(&weight)) && !ROPE_FACTORS.contains(&name.as_str())
    };
    let all: Vec<_> = model.file.tensors.keys().filter(unknown).collect();
    if let Some(first) = all.first() {
        found.notes.push(format!("{} tensors do not belong to the architecture (first: {first})", all.len()));
    }
}

/// Checks that the metadata describe the source's model.
fn check_config(ours: &ModelConfig, theirs: &ModelConfig, found: &mut Verification) {
    // Some architectures share one name in GGUF; their features are compared below.
    let family = |c: &ModelConfig| {
        Architecture::of_model_type(c.architecture.name, c.experts.is_some())
            .map_or(c.architecture.name, |written| written.model_type())
    };
    // A window as wide as the context leaves out no key.
    let windows = |c: &ModelConfig| -> Vec<_> {
        let within = |window: &usize| *window < c.max_position_embeddings;
        c.windows.iter().map(|window| window.filter(within)).collect()
    };
    // The factor of the load-balancing loss is for training alone, and GGUF has no field for it. It has its own form of
    // fused experts.
    let experts = |c: &ModelConfig| {
        let known = |experts| mantissa_model::config::Experts { balance_loss: None, fused: None, ..experts };
        c.experts.clone().map(known)
    };
    // A flag without layers that it holds for changes nothing.
    let by_layer = |c: &ModelConfig| {
        let wide_shared = c.by_layer.wide_shared && c.by_layer.shared_from < c.num_hidden_layers;
        mantissa_model::config::LayerFeatures { wide_shared, ..c.by_layer.clone() }
    };
    // The width of an MLP that no layer has.
    let mlp = |c: &ModelConfig| {
        let dense = |layer: &usize| match &c.experts {
            Some(experts) => !experts.layers[*layer] || experts.dense != DenseMlp::None,
            None => true,
        };
        let has = (0..c.num_hidden_layers).filter(|&layer| c.has_mlp[layer]).any(|layer| dense(&layer));
        if has { c.intermediate_size.to_string() } else { "of no layer".to_owned() }
    };
    let text = |c: &ModelConfig| {
        [
            ("model_type", family(c).to_owned()),
            ("hidden_size", c.hidden_size.to_string()),
            ("intermediate_size", mlp(c)),
            ("num_hidden_layers", c.num_hidden_layers.to_string()),
            ("num_attention_heads", c.num_attention_heads.to_string()),
            ("num_key_value_heads", c.num_key_value_heads.to_string()),
            ("head_dim", c.head_dim.to_string()),
            ("vocab_size", c.vocab_size.to_string()),
            ("max_position_embeddings", c.max_position_embeddings.to_string()),
            ("rms_norm_eps", c.rms_norm_eps.to_string()),
            ("tie_word_embeddings", c.tie_word_embeddings.to_string()),
            ("hidden_act", c.hidden_act.to_string()),
            ("biases", format!("{:?}", c.biases)),
            ("experts", format!("{:?}", experts(c))),
            ("norm_places", format!("{:?}", c.norm_places)),
            ("rotary_dim", c.rotary_dim.to_string()),
            ("attention_scale", c.attention_scale.to_string()),
            ("softcapping", format!("{:?} {:?}", c.attention_softcap, c.logit_softcap)),
            ("clip_qkv", format!("{:?}", c.clip_qkv)),
            ("latent", format!("{:?}", c.latent)),
            ("indexer", format!("{:?}", c.indexer)),
            ("sliding_window", format!("{:?}", windows(c))),
            ("rotated_layers", format!("{:?}", c.rotated_layers)),
            ("layers", format!("{:?}", by_layer(c))),
            ("query_growth", format!("{:?}", c.query_growth)),
            ("mixers", format!("{:?} {:?} {:?}", c.recurrent, c.mixing, c.has_mlp)),
            ("multipliers", format!("{:?}", c.multipliers)),
            ("head_norms", format!("{:?}", c.head_norms)),
        ]
    };
    for ((field, ours), (_, theirs)) in text(ours).into_iter().zip(text(theirs)) {
        if ours != theirs {
            found.faults.push(format!("{field}: expected {theirs} as in the source, got {ours}"));
        }
    }
    let width = |c: &ModelConfig| c.by_layer.global_heads.map_or(c.head_dim, |global| global.head_dim);
    let near = |a: f32, b: f32| (a - b).abs() <= 2e-6 * b.abs();
    let frequencies =
        (ours.rope.inverse_frequencies(width(ours)), theirs.rope.inverse_frequencies(width(theirs)));
    let rotated = frequencies.0.iter().zip(&frequencies.1).position(|(&a, &b)| !near(a, b));
    if let Some(i) = rotated {
        let (a, b) = (frequencies.0[i], frequencies.1[i]);
        found.faults.push(format!("rotary frequency {i}: expected {b:e} as in the source, got {a:e}"));
    }
    let scales = (ours.rope.attention_factor(), theirs.rope.attention_factor());
    if !near(scales.0, scales.1) {
        found.faults.push(format!(
            "rotary attention factor: expected {} as in the source, got {}",
            scales.1, scales.0
        ));
    }
}

/// Model decoded independently; its configuration is the ordinary reader's.
struct Independent<'a> {
    files: &'a ModelFiles,
    model: &'a Model<'a>,
}

/// Returns the independent reader's model of a GGUF file.
fn independent(file: GgufFile) -> Model<'static> {
    let architecture = file.text("general.architecture").and_then(|name| {
        let experts = file.number(&format!("{name}.expert_count")).is_some_and(|count| count > 0);
        Architecture::parse(name, experts)
    });
    Model::new(file, move |name| {
        let found = architecture.map_or_else(|| place(name), |architecture| architecture.place(name))?;
        Some(Place { tensor: found.tensor, expert: found.expert, half: found.half })
    })
}

/// Converts an error of the independent reader to the ordinary reader's.
pub(super) fn store_error(path: &Path, error: mantissa_verify::gguf::Error) -> Error {
    use mantissa_verify::gguf::Error as Other;
    match error {
        Other::Io { path, operation, error } => Error::Io { path, operation, error },
        Other::Field { path, field, expected, got } => Error::field(&path, field, got, expected, ""),
        Other::Missing { tensor } => Error::NoTensor { path: path.to_owned(), tensor },
    }
}

impl WeightSource for Independent<'_> {
    fn config(&self) -> Option<&Value> {
        self.files.config()
    }

    fn dir(&self) -> Option<&Path> {
        None
    }

    fn location(&self) -> String {
        self.files.dir().display().to_string()
    }

    fn has(&self, tensor: &str) -> bool {
        self.model.has(tensor)
    }

    /// Returns false: every layer is stored by rows here.
    fn is_dense(&self, _tensor: &str) -> bool {
        false
    }

    fn stores_alike(&self, a: &str, b: &str) -> std::result::Result<bool, LoadError> {
        Ok(self.files.stores_alike(a, b)?)
    }

    fn integers(&self, tensor: &str, shape: &[usize]) -> std::result::Result<Vec<u32>, LoadError> {
        Ok(self.files.integers(tensor, shape)?)
    }

    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> std::result::Result<Vec<f32>, LoadError> {
        let (rows, cols) = matrix(shape);
        Ok(self.whole(tensor, rows, cols)?)
    }

    fn linear(
        &self,
        module: &str,
        rows: usize,
        cols: usize,
        bias: bool,
    ) -> std::result::Result<LinearWeight, LoadError> {
        let weight = Weight::F32(self.whole(&format!("{module}.weight"), rows, cols)?);
        let bias = if bias { Some(self.whole(&format!("{module}.bias"), rows, 1)?) } else { None };
        Ok(LinearWeight { rows, cols, weight, bias, input: None, transforms: Default::default() })
    }
}

impl Independent<'_> {
    fn whole(&self, name: &str, rows: usize, cols: usize) -> std::result::Result<Vec<f32>, Error> {
        self.model.whole(name, rows, cols).map_err(|error| store_error(self.files.dir(), error))
    }
}

/// Returns rows and columns. A vector is a column, so that moving rows moves its elements.
fn matrix(shape: &[usize]) -> (usize, usize) {
    (shape.first().copied().unwrap_or(1), shape.iter().skip(1).product())
}

/// Returns the bits per weight of a type.
pub(super) fn bits_per_weight(ty: BlockType) -> f64 {
    let (elements, bytes) = ty.block();
    8.0 * bytes as f64 / elements.max(1) as f64
}

/// A tensor from the ordinary reader, row by row.
enum Ordinary<'a> {
    /// Unquantized and in its order: read on demand.
    Streamed {
        files: &'a ModelFiles,
        stored: String,
    },
    F32(Vec<f32>),
    Bf16(Vec<u16>),
    F16(Vec<u16>),
    Quantized(Box<Quantized>),
}

impl<'a> Ordinary<'a> {
    fn open(files: &'a ModelFiles, stored: String, tensor: &Tensor, info: &TensorInfo) -> Result<Self> {
        let (rows, cols) = matrix(&info.shape);
        let unchanged = |model: &gguf::Model| {
            let part = model.place(&info.name).is_some_and(|place| place.expert.is_some());
            let moved = model.row_order().of(&info.name).is_some();
            let same = model.architecture().is_none_or(|found| found.stored_as(&info.name) == Stored::Same);
            !part && !moved && same
        };
        if !tensor.ty.is_blocks() && files.gguf().is_some_and(unchanged) {
            return Ok(Ordinary::Streamed { files, stored });
        }
        let module = info.name.strip_suffix(".weight").filter(|_| info.shape.len() == 2);
        let Some(module) = module else {
            return Ok(Ordinary::F32(files.tensor_f32(&info.name, &info.shape)?));
        };
        let linear = files.linear(module, rows, cols, false)?;
        if let (Weight::Quantized(q), false) = (&linear.weight, linear.transforms.is_empty()) {
            // Columns that have moved, in their own order.
            let mut values = q.dequantize().map_err(|error| QuantError::Tensor {
                path: files.dir().to_owned(),
                tensor: info.name.clone(),
                error,
            })?;
            linear.transforms.fold(&mut values, rows, cols);
            return Ok(Ordinary::F32(values));
        }
        Ok(match linear.weight {
            Weight::F32(values) => Ordinary::F32(values),
            Weight::Bf16(words) => Ordinary::Bf16(words),
            Weight::F16(words) => Ordinary::F16(words),
            Weight::Quantized(q) => Ordinary::Quantized(Box::new(q)),
        })
    }

    fn rows(&self, range: Range<usize>, cols: usize, out: &mut [f32]) -> Result<()> {
        let elements = range.start * cols..range.end * cols;
        match self {
            Ordinary::Streamed { files, stored } => {
                let count = elements.len();
                out.copy_from_slice(&files.checkpoint().read_elements_f32(stored, elements.start, count)?);
            }
            Ordinary::F32(values) => out.copy_from_slice(&values[elements]),
            Ordinary::Bf16(words) => kernels().bf16_to_f32(&words[elements], out),
            Ordinary::F16(words) => kernels().f16_to_f32(&words[elements], out),
            Ordinary::Quantized(q) => {
                let mut dequantizer = Dequantizer::new(q);
                range.zip(out.chunks_exact_mut(cols)).for_each(|(row, out)| dequantizer.row(row, out));
            }
        }
        Ok(())
    }
}

/// Check of one tensor: decoded twice and compared with its source.
pub(super) struct TensorCheck<'a> {
    pub(super) files: &'a ModelFiles,
    pub(super) model: &'a Model<'a>,
    pub(super) source: Option<&'a ModelFiles>,
    pub(super) config: &'a ModelConfig,
    pub(super) info: &'a TensorInfo,
    pub(super) bounded: bool,
    /// True if the file records an importance matrix.
    pub(super) weighed: bool,
}

impl TensorCheck<'_> {
    fn run(&self, threads: usize, found: &mut Verification) -> Result<()> {
        let TensorInfo { name, shape, .. } = self.info;
        // GGUF splits some tensors of a checkpoint.
        if let Some(parts) = self.model.parts(name) {
            return self.run_parts(&parts, found);
        }
        let (stored, tensor, (which, of)) = self.model.tensor(name).map_err(|e| self.read_error(e))?;
        if !tensor.ty.is_decoded() {
            return Ok(());
        }
        let mut dims: Vec<u64> = shape.iter().rev().map(|&n| n as u64).collect();
        if let Some(place) = self.model.place(name).filter(|place| place.expert.is_some()) {
            dims[1] *= place.halves();
            dims.push(of / place.halves());
        }
        // Vectors of recurrent mixers may have other dimensions.
        let elements: u64 = shape.iter().map(|&n| n as u64).product();
        let vector =
            shape.len() != 2 && !tensor.ty.is_blocks() && tensor.dims.iter().product::<u64>() == elements;
        if tensor.dims != dims && !vector {
            let got = &tensor.dims;
            found.faults.push(format!("{stored}: expected dimensions {dims:?}, got {got:?}"));
            return Ok(());
        }
        if matches!(self.info.role, Role::Vector { kind, .. } if kind.is_integer()) {
            return self.run_integers(found);
        }
        let (rows, cols) = matrix(shape);
        let ordinary = Ordinary::open(self.files, stored.clone(), tensor, self.info)?;
        let source = self.source.map(|source| self.dense(source)).transpose()?;
        let factor = self.model.factor(&stored, which, of).map_err(|e| self.read_error(e))?.unwrap_or(1.0);
        let grain = (PANEL / cols.max(1)).max(1);
        let check = |range: Range<usize>| self.panel(range, &ordinary, source.as_ref(), (tensor.ty, factor));
        let all = map_reduce_fixed(threads, rows, grain, check, Ok(Rows::default()), |all, part| {
            Ok::<_, QuantError>(Rows::merge(all?, part?))
        })?;
        found.weights += 1;
        found.faults.extend(all.difference);
        if source.is_some() {
            found.compared += 1;
            found.max_error_in_bounds = Some(found.max_error_in_bounds.unwrap_or(0.0).max(all.worst.ratio));
            if self.bounded && all.worst.ratio > 1.0 {
                found.faults.push(all.worst.text(name));
            }
            all.signal.judge(name, bits_per_weight(tensor.ty), found);
        }
        Ok(())
    }

    /// Compares a table of integers between the readers, and with the source.
    fn run_integers(&self, found: &mut Verification) -> Result<()> {
        let TensorInfo { name, shape, .. } = self.info;
        let (rows, cols) = matrix(shape);
        let ours = self.model.whole(name, rows, cols).map_err(|e| self.read_error(e))?;
        let theirs = self.files.integers(name, shape)?;
        if ours.iter().zip(&theirs).any(|(a, b)| f64::from(*a) != f64::from(*b)) {
            found.faults.push(format!("{name}: the readers find other integers"));
        }
        found.weights += 1;
        let Some(source) = self.source else { return Ok(()) };
        found.compared += 1;
        if source.integers(name, shape)? != theirs {
            found.faults.push(format!("{name}: other integers than in the source"));
        }
        Ok(())
    }

    /// Opens the source's tensor.
    pub(super) fn dense<'s>(&self, source: &'s ModelFiles) -> Result<DenseTensor<'s>> {
        let linear = linear_of(self.config, self.info);
        let name =
            linear.as_ref().map_or_else(|| self.info.name.clone(), |linear| linear.tensor_in(source).0);
        if source.is_quantized() || !source.has(&name) {
            let what = format!("it has no dense tensor {}", self.info.name);
            return Err(reference_fault(self.files.dir(), source.dir(), what));
        }
        Ok(match linear {
            Some(linear) => DenseTensor::of_linear(&Folded::plain(source), &linear)?,
            None => DenseTensor::open(source, &self.info.name, &self.info.shape)?,
        })
    }

    /// Compares a range of rows between the readers, and with the source.
    fn panel(
        &self,
        range: Range<usize>,
        ordinary: &Ordinary<'_>,
        source: Option<&DenseTensor<'_>>,
        (ty, factor): (BlockType, f32),
    ) -> Result<Rows> {
        let (rows, cols) = matrix(&self.info.shape);
        let n = range.len() * cols;
        let (mut ours, mut theirs) = (vec![0.0; n], vec![0.0; n]);
        self.model
            .rows(&self.info.name, (rows, cols), range.clone(), &mut ours)
            .map_err(|e| self.read_error(e))?;
        ordinary.rows(range.clone(), cols, &mut theirs)?;
        let mut found = Rows::default();
        let differs = |(a, b): (&f32, &f32)| a != b && !(a.is_nan() && b.is_nan());
        if let Some(i) = ours.iter().zip(&theirs).position(differs) {
            let (row, col) = (range.start + i / cols, i % cols);
            let (a, b, name) = (ours[i], theirs[i], &self.info.name);
            found.difference = Some(format!(
                "{name}: element [{row}, {col}]: independent reader {a:e}, ordinary reader {b:e}"
            ));
        }
        let Some(source) = source else { return Ok(found) };
        let mut scratch = Scratch::default();
        let elements = range.start * cols..range.end * cols;
        let mut w = source.elements(elements, &mut scratch).map_err(|error| self.error(error))?;
        let rounded: Vec<f32>;
        if let Some(round_trip) = self.model.round_trip(&self.info.name) {
            // The file stores a function of the values, rounded to f32.
            rounded = w.iter().map(|w| round_trip(*w)).collect();
            w = &rounded;
        }
        for (i, (w, ours)) in w.chunks(cols).zip(ours.chunks(cols)).enumerate() {
            worst_of_row((ty, factor, self.weighed), range.start + i, w, ours, &mut found.worst);
            found.signal.add(w, ours);
        }
        Ok(found)
    }

    pub(super) fn read_error(&self, error: mantissa_verify::gguf::Error) -> QuantError {
        store_error(self.files.dir(), error).into()
    }

    pub(super) fn error(&self, error: DenseError) -> QuantError {
        match error {
            DenseError::Store(error) => error.into(),
            DenseError::Tensor(error) => {
                let (path, tensor) = (self.files.dir().to_owned(), self.info.name.clone());
                QuantError::Tensor { path, tensor, error }
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::BlockType;
    use mantissa_store::gguf::GgmlType;

    #[test]
    fn both_readers_agree_on_block_types() {
        for theirs in GgmlType::ALL {
            let ours = BlockType::from_id(theirs.id).unwrap();
            assert_eq!(format!("{ours:?}"), theirs.name);
            assert_eq!(ours.block(), theirs.block(), "{ours:?}");
            assert_eq!(BlockType::from_name(theirs.name), Some(ours));
        }
    }
}

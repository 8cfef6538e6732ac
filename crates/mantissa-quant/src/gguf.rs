//! Plan of a GGUF file for llama.cpp: the type of each tensor, and the metadata.
//!
//! Linear layers take the recipe's scheme. If its blocks do not divide a row, they fall back to f16 with a note.
//! Embedding and head are f16 unless a rule of the recipe names them. Norms and other vectors are f32, as llama.cpp
//! requires.

mod architecture;
mod carried;
mod compressed;
mod factors;
mod keys;
mod limits;
mod parameters;
mod recurrent;
mod schemes;
mod streams;
mod ternary;

use std::collections::HashMap;

use mantissa_model::config::Recurrent;
use mantissa_model::graph::SideKind;
use mantissa_model::{LinearKind, ModelConfig, Role, TensorInfo};
use mantissa_num::{Code, Format, Rule, Scheme, minifloat};
use mantissa_store::convention::ModelFiles;
use mantissa_store::convention::gguf::{self, Architecture, block_type};
use mantissa_store::end_tokens::{self, EndTokens};
use mantissa_store::gguf::{GgmlType, GgufTensorSpec, Storage, Value, ValueType};
use mantissa_store::{Error, Shown};

use crate::error::Result;
use crate::plan::{Cast, Layout, Options, PlannedLinear, WeightJob};
use crate::recipe::{LayerRule, TensorRole, chosen};
use crate::row_order::order_of;

pub use factors::as_in_gguf;

use architecture::{family_metadata, rope_factors, rope_metadata, sizes};
use keys::extend;
pub(crate) use limits::fault;
use parameters::{Adding, dense_name};
pub(crate) use parameters::{heads, linear_of, parameters, values};
use schemes::{fitting, fitting_in, plain, source_scheme};
pub(crate) use ternary::quantize as quantize_ternary;

/// Replaces schemes whose blocks do not divide a row and returns the modules, each with the reason. Layers that become
/// several tensors are left out, unless those are whole rows under a scheme without a separate factor, and, if the method of
/// a module `learns` whole decoder layers, those whose columns move.
pub(crate) fn fall_back(
    config: &ModelConfig,
    linears: &mut [PlannedLinear],
    learns: impl Fn(&str) -> bool,
) -> Vec<(String, String)> {
    let mut fallbacks = Vec::new();
    let row = Architecture::of_model_type(config.architecture.name, config.experts.is_some());
    for PlannedLinear { info, scheme } in linears {
        let weight = format!("{}.weight", info.module);
        let order = row.map(|row| order_of(row, config));
        let joined = row.zip(order).and_then(|(row, order)| row.joined(&weight, order));
        let moves = order.is_some_and(|order| order.columns(&weight).is_some());
        let factor = scheme.as_ref().is_some_and(|scheme| gguf::has_factor(&scheme.format));
        let apart = joined.is_some_and(|joined| factor || joined.rows(info.rows).is_none());
        if info.kind == LinearKind::KvB || apart || moves && learns(&info.module) {
            *scheme = None;
        }
        let Some(wanted) = scheme.as_mut() else { continue };
        let block = block_type(&wanted.format).map_or(1, |ty| ty.block().0);
        if !info.cols.is_multiple_of(block) {
            let (cols, instead) = (info.cols, fitting_in(config, wanted, info.cols));
            let why = format!("{instead} instead of {wanted}: rows of {cols} are not multiples of {block}");
            fallbacks.push((info.module.clone(), why));
            *wanted = instead;
        }
    }
    fallbacks
}

impl Layout {
    /// # Errors
    /// A field of the model that GGUF or llama.cpp cannot express.
    pub(crate) fn new(
        source: &ModelFiles,
        job: &WeightJob,
        weights: &Scheme,
        config: &ModelConfig,
        linears: &[PlannedLinear],
        options: &Options,
    ) -> Result<Self> {
        let architecture = limits::architecture(source, config)?;
        let mut layout = Layout {
            metadata: Vec::new(),
            tensors: Vec::new(),
            casts: Vec::new(),
            joined: Vec::new(),
            integers: Vec::new(),
            architecture,
            order: order_of(architecture, config),
            rope_factors: rope_factors(architecture, config),
            unread: streams::unread(architecture, config, weights),
            carried: Vec::new(),
            opaque_tokenizer: false,
            notes: architecture::notes(architecture, config),
        };
        let planned = linears.iter().map(|linear| (linear.info.module.as_str(), linear)).collect();
        let (stacks, streams) = (HashMap::new(), config.by_layer.streams.map_or(0, |all| all.count - 1));
        let mut adding =
            Adding { source, job, weights, options, planned, experts: experts(config), streams, stacks };
        let mut lists: Vec<(&str, Vec<Value>)> = Vec::new();
        for info in parameters(config) {
            if let Some(key) = architecture.place(&info.name).and_then(|p| architecture.listed_as(&p.tensor))
            {
                let numbers = source.tensor_f32(&info.name, &info.shape)?.into_iter().map(Value::F32);
                match lists.iter_mut().find(|(known, _)| *known == key) {
                    Some((_, list)) => list.extend(numbers),
                    None => lists.push((key, numbers.collect())),
                }
                continue;
            }
            if let Some(joined) = architecture.joined(&info.name, layout.order) {
                match adding.scheme_of_layer(&info) {
                    Some(scheme) => layout.declare_rows(&scheme, &info, &joined),
                    None => layout.add_joined(&adding, config, info, joined)?,
                }
                continue;
            }
            let scheme = layout.table_scheme(job, config, options, &info);
            layout.add(&mut adding, config, info, scheme)?;
        }
        for (name, factors) in &layout.rope_factors {
            layout.tensors.push(GgufTensorSpec::new(*name, GgmlType::F32, [factors.len()]));
        }
        layout.tensors.extend(layout.unread.iter().cloned());
        if let Some(model) = source.gguf() {
            layout.carried = carried::tensors(model, architecture, config, &layout.tensors);
            layout.tensors.extend(layout.carried.iter().cloned());
        }
        let ty = block_type(&weights.format).unwrap_or(GgmlType::F16);
        let quantized = layout.tensors.iter().any(|t| !matches!(t.ty.storage, Storage::Plain(_)));
        let name = name_of(source);
        let number =
            job.recipe().and_then(|recipe| recipe.file_type).map(|ty| ty.number).or_else(|| ty.file_type());
        layout.metadata = gguf::metadata(architecture, name.as_deref(), &sizes(config), number, quantized);
        extend(&mut layout.metadata, family_metadata(architecture, config));
        layout.metadata.extend(rope_metadata(architecture, &config.rope));
        let lists = lists.into_iter();
        layout.metadata.extend(lists.map(|(key, list)| (key.to_owned(), Value::Array(ValueType::F32, list))));
        layout.put_tokenizer(source, config, job)?;
        Ok(layout)
    }

    fn add(
        &mut self,
        adding: &mut Adding<'_>,
        config: &ModelConfig,
        info: TensorInfo,
        of_type: Option<Scheme>,
    ) -> Result<()> {
        let Adding { source, job, weights, planned, .. } = adding;
        let source = *source;
        let place = self.architecture.place(&info.name).ok_or_else(|| {
            fault(source, &info.name, "this tensor", "a tensor that llama.cpp knows by name")
        })?;
        let planned = planned.get(info.name.trim_end_matches(".weight")).copied();
        if let (Role::Linear { .. } | Role::Embedding | Role::Head, Some(scheme)) =
            (info.role, planned.and_then(|linear| linear.scheme.as_ref()))
        {
            // The job quantizes this layer, or keeps its codes, later; here only its tensor is declared.
            let ty = block_type(&scheme.format).unwrap_or(GgmlType::F32);
            let factor = ternary::factor_beside(config, job, scheme);
            if factor && ty != GgmlType::NVFP4 && !self.architecture.weight_factors {
                let expected = "a scheme with scales in its blocks; only bitnet has a separate factor";
                return Err(fault(source, &info.name, scheme.to_string(), expected));
            }
            let own = self.architecture.is_own_scale(&place.tensor.replace(".weight", ".scale"));
            if factor && (own || place.half.is_some()) {
                let expected = "a scheme without a separate factor, which has no place in this architecture";
                return Err(fault(source, &info.name, scheme.to_string(), expected));
            }
            return adding.declare(&mut self.tensors, &place, ty, &info, factor);
        }
        if let Role::Vector { kind, .. } = info.role
            && kind.is_integer()
        {
            adding.declare(&mut self.tensors, &place, GgmlType::I32, &info, false)?;
            self.integers.push((info, place.tensor));
            return Ok(());
        }
        // All other tensors are cast when the file is written.
        let scheme = of_type.map_or_else(|| cast_scheme(source, (job, weights), config, &info), Ok)?;
        let ty = block_type(&scheme.format).filter(|ty| {
            let cols = info.shape.last().copied().unwrap_or(1);
            ty.row_bytes(cols).is_some() && !scheme.has_outer_scale()
        });
        let ty = ty.ok_or_else(|| {
            let cols = info.shape.last().copied().unwrap_or(1);
            let expected = format!("a GGUF type whose blocks divide rows of {cols}");
            let fix = format!("fix: {} there, or write another format", fitting(&scheme, cols));
            Error::field(&source.config_path(), &info.name, scheme.to_string(), expected, fix)
        })?;
        let shape = self.architecture.stored_shape(&info.name, &info.shape, groups(config));
        adding.declare(&mut self.tensors, &place, ty, &TensorInfo { shape, ..info.clone() }, false)?;
        self.casts.push(Cast { info, place, scheme });
        Ok(())
    }

    /// Returns the file type's scheme of embedding, embeddings of layers and head, unless a rule of the recipe names them.
    fn table_scheme(
        &mut self,
        job: &WeightJob,
        config: &ModelConfig,
        options: &Options,
        info: &TensorInfo,
    ) -> Option<Scheme> {
        let recipe = job.recipe()?;
        recipe.rule_of(info.name.trim_end_matches(".weight")).is_none().then_some(())?;
        let is_layer_table = info.role == Role::LayerInputs && info.name == config.layer_input_names()[0];
        let part = match info.role {
            // llama.cpp takes the embeddings of layers as the embedding.
            _ if is_layer_table && !config.tie_word_embeddings => TensorRole::Embedding,
            Role::Embedding if !config.tie_word_embeddings => TensorRole::Embedding,
            Role::Embedding | Role::Head => TensorRole::Head,
            _ if is_layer_table => TensorRole::Head,
            _ => return None,
        };
        let wanted = Scheme::codec(chosen(recipe.file_type?, config, part, options.has_importance()));
        let cols = info.shape.last().copied().unwrap_or(1);
        let scheme = fitting(&wanted, cols);
        if scheme != wanted {
            let name = &info.name;
            self.notes.push(format!(
                "{name}: {scheme} instead of {wanted}: rows of {cols} are not multiples of its blocks"
            ));
        }
        Some(scheme)
    }

    /// Adds the tokenizer. A GGUF source has it among its keys, all of which are kept.
    fn put_tokenizer(&mut self, source: &ModelFiles, config: &ModelConfig, job: &WeightJob) -> Result<()> {
        if let Some(model) = source.gguf() {
            carried::keys(&mut self.metadata, model, self.architecture, job);
            let note = carried::note_on_kept_tokenizer(source);
            self.opaque_tokenizer = note.is_some();
            self.notes.extend(note);
            return Ok(());
        }
        let merged = self.architecture.merged_tokens;
        let exported = mantissa_model::tokenizer::gguf::export(source.dir(), config.vocab_size, merged)?;
        self.metadata.extend(exported.metadata);
        self.notes.extend(exported.notes);
        self.put_end_tokens(&config.eos_token_ids);
        Ok(())
    }

    /// States the end tokens `ids` beside the tokenizer.
    fn put_end_tokens(&mut self, ids: &[u32]) {
        let value = |key: &str| self.metadata.iter().find(|(name, _)| name == key).map(|(_, value)| value);
        let texts = value("tokenizer.ggml.tokens").and_then(Value::as_array).unwrap_or_default();
        let name = |id: u32| texts.get(id as usize).and_then(Value::as_str).map(str::to_owned);
        let of_tokenizer = value(end_tokens::GGUF_KEYS[0]).and_then(Value::as_u64);
        let first = of_tokenizer.and_then(|id| u32::try_from(id).ok());
        let (keys, lost) = EndTokens::gguf_keys(ids, first, name);
        let kind = value("tokenizer.ggml.model").and_then(Value::as_str).unwrap_or_default();
        if let (true, None, Some(id)) = (keys.is_empty(), of_tokenizer, end_tokens::default_of(kind)) {
            let text = name(id).unwrap_or_default();
            self.notes.push(format!(
                "the model states no end token: llama.cpp then ends at its default, token {id}, \"{}\"",
                Shown(&text)
            ));
        }
        for (key, id) in keys {
            match self.metadata.iter_mut().find(|(name, _)| name == key) {
                Some((_, value)) => *value = Value::U32(id),
                None => self.metadata.push((key.to_owned(), Value::U32(id))),
            }
        }
        if !lost.is_empty() {
            self.notes.push(format!(
                "end tokens {lost:?}: GGUF has keys for three; llama.cpp does not stop at these"
            ));
        }
    }
}

/// Returns the name of a model: from the metadata of a GGUF file, or the name of its folder.
fn name_of(source: &ModelFiles) -> Option<String> {
    let stated = source.gguf().and_then(|model| model.metadata().text("general.name").ok().flatten());
    let folder_name =
        || source.dir().file_stem().filter(|_| source.gguf().is_some()).or(source.dir().file_name());
    stated.or_else(|| folder_name()?.to_str()).map(str::to_owned)
}

/// Returns the number of experts of a layer.
fn experts(config: &ModelConfig) -> usize {
    config.experts.as_ref().map_or(0, |experts| usize::from(experts.count))
}

/// Returns the number of groups of a recurrent mixer.
fn groups(config: &ModelConfig) -> usize {
    config.recurrent.as_ref().map_or(1, Recurrent::groups)
}

/// Returns the scheme of a tensor that is not quantized as a layer.
fn cast_scheme(
    source: &ModelFiles,
    (job, weights): (&WeightJob, &Scheme),
    config: &ModelConfig,
    info: &TensorInfo,
) -> Result<Scheme> {
    if info.shape.len() < 2 {
        return Ok(Scheme::new(Format::plain(Code::F32), Rule::Amax));
    }
    let module = info.name.trim_end_matches(".weight");
    let full = Scheme::new(Format::plain(Code::F32), Rule::Amax);
    match (info.role, job) {
        // As large as projections of the attention.
        (
            Role::Side {
                kind: SideKind::IndexQueries | SideKind::IndexKeys | SideKind::IndexWeights, ..
            },
            _,
        ) => source_scheme(source, &info.name),
        // As large as projections of the attention, or near it.
        (
            Role::Side {
                kind:
                    SideKind::OutputGroups
                    | SideKind::BlockValues
                    | SideKind::BlockGate
                    | SideKind::IndexBlockValues
                    | SideKind::IndexBlockGate
                    | SideKind::EnterStream(_)
                    | SideKind::LeaveStream(_)
                    | SideKind::LaurelLeft
                    | SideKind::LaurelRight,
                ..
            },
            _,
        ) => source_scheme(source, &info.name),
        // llama.cpp needs routers and positions in f32.
        (Role::Side { .. } | Role::Positions | Role::Vector { .. }, _) => Ok(full),
        (
            Role::Embedding | Role::Head,
            WeightJob::Convert { table, .. } | WeightJob::Requantize { table, .. },
        ) => Ok(table.clone()),
        (Role::Embedding | Role::Head, WeightJob::Quantize(recipe)) => match recipe.rule_of(module) {
            None => Ok(match block_type(&weights.format) {
                Some(GgmlType::F32) => full,
                Some(GgmlType::BF16) => plain(minifloat::BF16),
                _ => plain(minifloat::F16),
            }),
            Some(LayerRule { weights: Some(scheme), .. }) => Ok(scheme.clone()),
            Some(_) => source_scheme(source, &dense_name(config, info)),
        },
        _ => source_scheme(source, &dense_name(config, info)),
    }
}

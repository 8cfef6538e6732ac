//! Sensitivity of each part of a model: the KL divergence from the source when that part alone is quantized,
//! measured on text.
//!
//! A unit is the smallest set of layers that engines allow its own scheme: one linear layer, one fused group
//! (q, k and v; gate and up), or all experts of a layer. KL values of units add up as long as errors are
//! small and independent; the KL of the finished model confirms or refutes this.

use mantissa_eval::stats::{Estimate, Sum, estimate};
use mantissa_eval::{Sequence, check_sequences, divergence, evaluate};
use mantissa_model::{
    Buffers, CacheInF32, Decoder, FusedGroup, KvPolicy, Layer, LinearInfo, LinearKind, load_config,
};
use mantissa_quant::Plan;
use mantissa_store::convention::ModelFiles;

use crate::error::Result;
use crate::run::{Ends, ROWS, States, each, through};

/// Linear layers that share one scheme.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// Layer index.
    pub layer: usize,
    /// Linear layers in graph order.
    pub linears: Vec<LinearInfo>,
}

/// Key that groups the linear layers of one decoder layer into a unit.
#[derive(PartialEq)]
enum Joined {
    Fused(FusedGroup),
    Experts,
    Alone(LinearKind),
}

impl Joined {
    fn of(kind: LinearKind) -> Self {
        match kind.fused() {
            _ if kind.expert().is_some() => Joined::Experts,
            Some(group) => Joined::Fused(group),
            None => Joined::Alone(kind),
        }
    }
}

impl Unit {
    /// Returns the units of the layers that `plan` quantizes, in graph order.
    pub fn of_plan(plan: &Plan) -> Vec<Unit> {
        let mut units: Vec<Unit> = Vec::new();
        for (info, _) in plan.quantized() {
            let partner = |unit: &&mut Unit| {
                unit.layer == info.layer && Joined::of(unit.linears[0].kind) == Joined::of(info.kind)
            };
            match units.iter_mut().find(partner) {
                Some(unit) => unit.linears.push(info.clone()),
                None => units.push(Unit { layer: info.layer, linears: vec![info.clone()] }),
            }
        }
        units
    }

    /// Returns the module names, all but the first shortened:
    /// `model.layers.0.self_attn.q_proj+k_proj+v_proj`.
    pub fn name(&self) -> String {
        let short = |module: &str| module.rsplit('.').next().unwrap_or(module).to_owned();
        let mut modules = self.linears.iter().map(|info| info.module.as_str());
        let first = modules.next().unwrap_or_default().to_owned();
        match self.linears.len() {
            0..=4 => modules.fold(first, |name, module| format!("{name}+{}", short(module))),
            n => format!("{first} and {} more", n - 1),
        }
    }
}

/// Source model in memory with its hidden states on some windows of text.
pub struct Baseline {
    config: mantissa_model::ModelConfig,
    ends: Ends,
    layers: Vec<Layer>,
    windows: Vec<Sequence>,
    /// Hidden states before each layer and after the last.
    states: Vec<States>,
    threads: usize,
}

impl Baseline {
    /// Runs `source` over `windows`.
    ///
    /// # Errors
    /// The model cannot be loaded, or cannot run these windows.
    pub fn new(source: &ModelFiles, windows: &[Sequence], threads: usize) -> Result<Self> {
        let config = load_config(source)?;
        check_sequences(&config, windows)?;
        let ends = Ends::load(source, &config)?;
        let layers: std::result::Result<Vec<_>, _> =
            (0..config.num_hidden_layers).map(|layer| Layer::load(source, &config, layer)).collect();
        let layers = layers?;
        let mut states = vec![ends.embed(&config, windows)?];
        for (i, layer) in layers.iter().enumerate() {
            let next = through(layer, &config, &states[i], threads)?;
            states.push(next);
        }
        Ok(Baseline { config, ends, layers, windows: windows.to_vec(), states, threads })
    }

    /// Returns the bytes of the baseline and one measurement, with weights as `source` stores them.
    ///
    /// # Errors
    /// The configuration of `source` is invalid.
    pub fn bytes(source: &ModelFiles, windows: &[Sequence], threads: usize) -> Result<u64> {
        let config = load_config(source)?;
        let tokens: usize = windows.iter().map(|w| w.tokens.len()).sum();
        let states = (tokens * config.hidden_size * 4 * (config.num_hidden_layers + 3)) as u64;
        let longest = windows.iter().map(|w| w.tokens.len()).max().unwrap_or(0);
        // A tied embedding is held twice: as a table and as a head.
        let table = (config.vocab_size * config.hidden_size) as u64;
        let tables = source.checkpoint().tensors().filter(|meta| meta.numel() == table).map(|meta| meta.len);
        let tied = if config.tie_word_embeddings { tables.max().unwrap_or(0) } else { 0 };
        // The altered layer, the candidate's layer, and the tensor being read.
        let layer: u64 = config.layer_linears(0).iter().map(|l| 2 * (l.rows * l.cols) as u64).sum();
        let largest = source.checkpoint().tensors().map(|meta| meta.len).max().unwrap_or(0);
        let logits = (2 * ROWS * config.vocab_size * 4) as u64;
        let pass = Buffers::bytes_needed(&config, longest, longest).saturating_add(logits);
        let passes = pass.saturating_mul(threads.clamp(1, windows.len().max(1)) as u64);
        let held = source.checkpoint().total_bytes() + states + tied + 2 * layer + largest;
        Ok(held.saturating_add(passes))
    }

    /// Measures the mean KL (nats/token) for each unit: the source with that unit's weights taken from
    /// `candidate`. `progress` receives every unit.
    ///
    /// # Errors
    /// The candidate has another shape.
    pub fn measure(
        &self,
        candidate: &ModelFiles,
        units: &[Unit],
        progress: &mut dyn FnMut(&Unit),
    ) -> Result<Vec<Estimate>> {
        let mut loaded: Option<(usize, Layer)> = None;
        let mut all = Vec::with_capacity(units.len());
        for unit in units {
            if loaded.as_ref().is_none_or(|(layer, _)| *layer != unit.layer) {
                loaded = Some((unit.layer, Layer::load(candidate, &self.config, unit.layer)?));
            }
            let Some((_, quantized)) = &loaded else { continue };
            let mut altered = self.layers[unit.layer].clone();
            for info in &unit.linears {
                if let (Some(place), Some(linear)) =
                    (altered.linear_mut(info.kind), quantized.linear(info.kind))
                {
                    *place = linear.clone();
                }
            }
            all.push(self.divergence(unit.layer, &altered)?);
            progress(unit);
        }
        Ok(all)
    }

    /// Returns the KL of the model with layer `layer` replaced by `altered`.
    fn divergence(&self, layer: usize, altered: &Layer) -> Result<Estimate> {
        let mut states = through(altered, &self.config, &self.states[layer], self.threads)?;
        for layer in &self.layers[layer + 1..] {
            states = through(layer, &self.config, &states, self.threads)?;
        }
        let unchanged = self.states.last().map_or(&[][..], Vec::as_slice);
        let sums = each(self.windows.len(), self.threads, |i| {
            let Sequence { tokens, from } = &self.windows[i];
            let predicted = from.saturating_sub(1)..tokens.len().saturating_sub(1);
            let (mut sum, vocabulary) = (Sum::default(), self.config.vocab_size);
            let mut reference = vec![0.0; ROWS * vocabulary];
            let part = ROWS * self.config.hidden_size;
            let parts = unchanged[i].chunks(part).zip(states[i].chunks(part)).enumerate();
            for (at, (unchanged, states)) in parts {
                let place = |row: usize| row * vocabulary..(row + 1) * vocabulary;
                self.ends.logits(unchanged, |row, logits| reference[place(row)].copy_from_slice(logits))?;
                self.ends.logits(states, |row, logits| {
                    if predicted.contains(&(at * ROWS + row)) {
                        sum.add(divergence(&reference[place(row)], logits));
                    }
                })?;
            }
            Ok(sum)
        })?;
        Ok(estimate(&sums))
    }
}

/// Measures the mean KL (nats/token) of the unquantized `source` with its KV cache in each of `policies`, against a
/// cache in f32.
///
/// # Errors
/// The model cannot be loaded or run; a scheme that the heads of the model cannot be stored in.
pub fn cache_schemes(
    source: &ModelFiles,
    policies: &[KvPolicy],
    windows: &[Sequence],
    threads: usize,
) -> Result<Vec<Estimate>> {
    let files = CacheInF32(source);
    let (plain, mut other) = (Decoder::load(&files)?, Decoder::load(&files)?);
    policies.iter().map(|policy| cache_scheme((&mut other, &plain), policy, windows, threads)).collect()
}

/// Measures the mean KL (nats/token) of the first decoder with its KV cache in `policy`, against the second.
///
/// # Errors
/// As [`cache_schemes`].
pub(crate) fn cache_scheme(
    (other, plain): (&mut Decoder, &Decoder),
    policy: &KvPolicy,
    windows: &[Sequence],
    threads: usize,
) -> Result<Estimate> {
    other.set_kv(policy)?;
    let found = evaluate(other, Some(plain), windows, threads, &|_| {})?.comparison;
    let none = Estimate { mean: f64::NAN, se: f64::NAN };
    Ok(found.map_or(none, |found| Estimate { mean: found.kl, se: found.kl_se }))
}

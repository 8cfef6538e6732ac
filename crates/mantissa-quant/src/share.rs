//! Share of a model's parameters that a plan quantizes: which modules stay unquantized, and why. Shown before work.

use std::collections::BTreeMap;

use mantissa_model::graph::SideKind;
use mantissa_model::{LinearInfo, Role};
use mantissa_store::convention::{Experts, ModelFiles};

use crate::error::{QuantError, Result};
use crate::plan::{Plan, spec_bytes};
use crate::quality::{Kept, QuantizedShare, SchemeShare};
use crate::stacks::only_fused;
use crate::unused;

/// Reason of a module that a pattern of `--keep` or of the recipe names.
const ASKED: &str = "--keep or the recipe names it";

/// Share of the linear layers that a recipe covers that must be quantized.
const LEAST: f64 = 0.95;

impl Plan {
    /// Returns the share of the parameters of `source` that it quantizes.
    pub fn share(&self, source: &ModelFiles) -> QuantizedShare {
        let numbers = |info: &LinearInfo| (info.rows * info.cols) as u64;
        let unknown: Vec<_> = unused::tensors(source, &self.config).collect();
        let quantized = self.linear_weights();
        let decoder: u64 = self.linears.iter().map(|linear| numbers(&linear.info)).sum();
        let mut kept = Keeping::default();
        let mut covered = quantized;
        for linear in self.linears.iter().filter(|linear| linear.scheme.is_none()) {
            let (why, meant) = self.why_kept(&linear.info);
            covered += if meant { numbers(&linear.info) } else { 0 };
            kept.add(&pattern(&linear.info.module), 1, numbers(&linear.info), why);
        }
        let skipped = unknown.iter().filter(|meta| unused::is_decoder_weight(&self.config, meta));
        for meta in skipped.clone().filter(|meta| !self.keeps(&meta.name)) {
            covered += meta.numel();
        }
        self.keep_others(&mut kept);
        let fate = if self.container.is_one_file() { "left out" } else { "copied" };
        for part in unused::parts(&self.config, unknown.iter().copied()) {
            let tower = self.config.wrapper.filter(|wrapper| wrapper.towers.contains(&part.name.as_str()));
            let why = match tower {
                Some(wrapper) => format!("tower or projector of {}, {fate}", wrapper.name),
                None => format!("not used by {}, {fate}", self.config.architecture.name),
            };
            kept.add(&part.name, part.tensors, part.parameters, why);
        }
        let matrices = unknown.iter().filter(|meta| unused::linear_module(meta).is_some());
        let fused = skipped.filter(|meta| meta.shape.len() == 3);
        let others: u64 = matrices.chain(fused).map(|meta| meta.numel()).sum();
        QuantizedShare {
            quantized,
            covered,
            linear: decoder + self.side_parameters() + others,
            parameters: self.config.parameters() + unknown.iter().map(|meta| meta.numel()).sum::<u64>(),
            schemes: self.scheme_shares(),
            kept: kept.all,
        }
    }

    /// Requires that the plan quantizes nearly all linear layers that the recipe covers.
    ///
    /// # Errors
    /// [`QuantError::Uncovered`] with the largest weight of a decoder layer that the architecture does not know.
    pub(crate) fn require_share(&self, source: &ModelFiles) -> Result<()> {
        let share = self.share(source);
        if share.quantized as f64 >= LEAST * share.covered as f64 {
            return Ok(());
        }
        let skipped = unused::tensors(source, &self.config)
            .filter(|meta| unused::is_decoder_weight(&self.config, meta) && !self.keeps(&meta.name));
        // What a format keeps is a fact about it, and listed.
        let Some(largest) = skipped.max_by_key(|meta| meta.numel()) else { return Ok(()) };
        let (tensor, shape) = (largest.name.clone(), largest.shape.clone());
        let architecture = self.config.architecture.name;
        let percent = share.percent();
        Err(QuantError::Uncovered { path: source.dir().to_owned(), percent, architecture, tensor, shape })
    }

    /// True if the recipe names the module of this tensor as one to keep.
    fn keeps(&self, tensor: &str) -> bool {
        let module = tensor.strip_suffix(".weight").unwrap_or(tensor);
        let rule = self.job.recipe().and_then(|recipe| recipe.rule_of(module));
        rule.is_some_and(|rule| rule.weights.is_none())
    }

    /// Reason why a linear layer stays, and true if the recipe covers it nevertheless.
    fn why_kept(&self, info: &LinearInfo) -> (String, bool) {
        if self.keeps(&info.module) {
            return (ASKED.to_owned(), false);
        }
        if self.container.facts().experts == Experts::Stacked && !only_fused(info) {
            return (format!("{} holds experts only", self.container.name()), false);
        }
        if self.options.scales.is_some() {
            return ("no learned scales".to_owned(), false);
        }
        (format!("{} keeps it", self.container.name()), true)
    }

    /// Adds routers and gates, and the embedding and head unless they are quantized.
    fn keep_others(&self, kept: &mut Keeping) {
        for info in self.config.tensors() {
            let numel = info.shape.iter().map(|&n| n as u64).product();
            let module = info.name.strip_suffix(".weight").unwrap_or(&info.name);
            let quantized = || {
                let tables = self.tables.iter().filter(|table| table.scheme.is_some());
                self.gguf.is_some() || tables.into_iter().any(|table| table.info.module == module)
            };
            let why = match info.role {
                Role::Embedding | Role::Head if !quantized() && self.keeps(module) => ASKED,
                Role::Side { kind: SideKind::Router, .. } => "router: engines read it unquantized",
                Role::Side { kind: SideKind::ToExperts | SideKind::FromExperts, .. } => {
                    "latent of experts: published recipes leave it unquantized"
                }
                Role::Side {
                    kind:
                        SideKind::Modalities
                        | SideKind::Prediction
                        | SideKind::Correction
                        | SideKind::LaurelLeft
                        | SideKind::LaurelRight
                        | SideKind::EnterStream(_)
                        | SideKind::LeaveStream(_),
                    ..
                } => "parallel streams and their low-rank path: published recipes leave them unquantized",
                Role::Side {
                    kind:
                        SideKind::BlockValues
                        | SideKind::BlockGate
                        | SideKind::IndexBlockValues
                        | SideKind::IndexBlockGate,
                    ..
                } => "projections of compressed entries: published in bf16 beside FP8 weights",
                Role::Side { kind: SideKind::OutputGroups, .. } => {
                    "output projection by groups of heads: engines read it as a batched product"
                }
                Role::Side {
                    kind: SideKind::IndexQueries | SideKind::IndexKeys | SideKind::IndexWeights,
                    ..
                } => "indexer: it chooses tokens, as a router chooses experts",
                Role::Side { kind, .. } if kind != SideKind::SharedGate => {
                    "rates and gates of a recurrent mixer: small, and engines read them unquantized"
                }
                Role::Side { .. } => "gate of experts: engines read it unquantized",
                Role::Embedding if !quantized() => "embedding: --embeddings quantizes it",
                Role::Head if !quantized() => "head: --head quantizes it",
                _ => continue,
            };
            kept.add(&pattern(module), 1, numel, why.to_owned());
        }
    }

    fn side_parameters(&self) -> u64 {
        let sides = self.config.tensors().into_iter().filter(|info| matches!(info.role, Role::Side { .. }));
        sides.map(|info| info.shape.iter().map(|&n| n as u64).product::<u64>()).sum()
    }

    fn scheme_shares(&self) -> Vec<SchemeShare> {
        let mut all: Vec<SchemeShare> = Vec::new();
        for (info, scheme) in self.quantized().chain(self.quantized_tables()) {
            let (name, bytes) = (Some(scheme.to_string()), self.stored_bits(info, scheme).div_ceil(8));
            let parameters = (info.rows * info.cols) as u64;
            match all.iter_mut().find(|known| known.scheme == name) {
                Some(known) => {
                    known.layers += 1;
                    known.parameters += parameters;
                    known.bytes += bytes;
                }
                None => all.push(SchemeShare { scheme: name, layers: 1, parameters, bytes }),
            }
        }
        let bytes = self.specs.iter().map(spec_bytes).sum::<u64>();
        let left = bytes.saturating_sub(all.iter().map(|share| share.bytes).sum());
        let text_parameters =
            self.config.parameters().saturating_sub(all.iter().map(|share| share.parameters).sum());
        if left > 0 {
            all.push(SchemeShare { scheme: None, layers: 0, parameters: text_parameters, bytes: left });
        }
        all
    }
}

/// Modules that stay, in groups.
#[derive(Default)]
struct Keeping {
    all: Vec<Kept>,
    known: BTreeMap<(String, String), usize>,
}

impl Keeping {
    fn add(&mut self, modules: &str, count: usize, parameters: u64, why: String) {
        let at = *self.known.entry((modules.to_owned(), why.clone())).or_insert_with(|| {
            self.all.push(Kept { modules: modules.to_owned(), count: 0, parameters: 0, why });
            self.all.len() - 1
        });
        self.all[at].count += count;
        self.all[at].parameters += parameters;
    }
}

/// Name of a module with `*` for its numbers.
fn pattern(module: &str) -> String {
    let part = |part: &str| match part.bytes().all(|byte| byte.is_ascii_digit()) {
        true => "*".to_owned(),
        false => part.to_owned(),
    };
    module.split('.').map(part).collect::<Vec<_>>().join(".")
}

//! Problems of a checkpoint that show in names, metadata and values rather than in layer shapes and schemes.

use mantissa_model::graph::HEAD;
use mantissa_model::tokenizer::gguf::TOKENIZER_NOTE;
use mantissa_model::{
    Bos, LinearInfo, LinearKind, ModelConfig, Tokenizer, end_tokens, read_json, unlisted_layers,
};
use mantissa_num::pack::Packing;
use mantissa_plan::contract::{Observation, Observed};
use mantissa_store::convention::ModelFiles;
use mantissa_store::convention::gguf::{Model, stored_name, to_gguf_order, to_hf_order};
use mantissa_store::end_tokens::{EndToken, EndTokens, GGUF_KEYS, default_of, named};
use mantissa_store::gguf::GgmlType;
use mantissa_store::{Dtype, Shown, TensorMeta};
use serde_json::Value;

use crate::error::Result;
use crate::values::{relative_error, values};

/// Properties examined, and problems observed.
type Properties = (Vec<Observed>, Vec<Observation>);

/// Name suffixes of tensors that only quantized layers have.
const QUANTIZED: [&str; 5] =
    ["weight_packed", "weight_scale", "weight_scale_inv", "qweight", "weight.absmax"];

/// File that most engines read end tokens from.
const GENERATION: &str = "generation_config.json";

/// Files from which groups of engines take end tokens.
const STOPS: [(Observed, &[&str]); 3] = [
    (Observed::EndBeyondGeneration, &[GENERATION]),
    (Observed::EndBeyondTokenizer, &[GENERATION, "tokenizer_config.json", "special_tokens_map.json"]),
    (
        Observed::EndBeyondFiles,
        &[GENERATION, "tokenizer_config.json", "special_tokens_map.json", "config.json"],
    ),
];

/// End token that SGLang finds by its name (`attach_additional_stop_token_ids`).
const BY_NAME: &str = "<|eom_id|>";

/// Examines tensors, config and tokenizer for the properties that rules of engines ask about.
pub(crate) fn examine(
    files: &ModelFiles,
    config: &ModelConfig,
    reference: Option<&ModelFiles>,
) -> Result<Properties> {
    let mut seen = Looking { files, examined: Vec::new(), found: Vec::new() };
    match files.gguf() {
        Some(model) => {
            seen.gguf_tensors(model);
            seen.gguf_tokenizer(model, config);
            if let Some(reference) = reference {
                seen.row_order(model, config, reference)?;
            }
        }
        None => {
            seen.head(config);
            seen.ignored_names();
            seen.unlisted(config);
            seen.routers_and_caches();
            seen.zero_points()?;
            seen.zero_point_note();
            seen.cache_scales(config)?;
            seen.bos_rule();
            seen.end_tokens();
            seen.token_rows(config);
        }
    }
    Ok((seen.examined, seen.found))
}

struct Looking<'a> {
    files: &'a ModelFiles,
    examined: Vec<Observed>,
    found: Vec<Observation>,
}

impl Looking<'_> {
    fn see(&mut self, what: Observed, tensor: impl Into<String>, found: impl Into<String>) {
        self.found.push(Observation { what, tensor: tensor.into(), found: found.into() });
    }

    fn head(&mut self, config: &ModelConfig) {
        self.examined.extend([Observed::Head, Observed::TiedHead]);
        let head = config.head_module();
        let (name, prefix) = (format!("{head}.weight"), format!("{head}."));
        if config.states_tied && !config.tie_word_embeddings {
            let found = "values that differ from the embedding, tie_word_embeddings true";
            self.see(Observed::TiedHead, name, found);
        } else if !config.tie_word_embeddings
            && !self.files.checkpoint().tensors().any(|meta| meta.name.starts_with(&prefix))
        {
            self.see(Observed::Head, name, "no such tensor, tie_word_embeddings false");
        }
    }

    /// Checks that the config leaves out the layers that are stored unquantized.
    fn unlisted(&mut self, config: &ModelConfig) {
        self.examined.push(Observed::UnlistedLayer);
        for layers in unlisted_layers(self.files, config) {
            self.see(Observed::UnlistedLayer, layers.first.clone(), layers.shown());
        }
    }

    /// Checks that the places from which engines take end tokens state all of them.
    fn end_tokens(&mut self) {
        self.examined.extend(STOPS.map(|(what, _)| what));
        let stated = self.files.config().map(|config| ModelConfig::from_json(config, "config.json"));
        let stated = stated.and_then(std::result::Result::ok).map(|stated| stated.eos_token_ids);
        let stated = stated.unwrap_or_default();
        let Ok(tokens) = end_tokens::of_folder(self.files.dir(), &stated) else { return };
        let of = |token: &EndToken, file: &str| token.sources.iter().any(|s| s.to_string().starts_with(file));
        let generation = self.files.dir().join(GENERATION).exists();
        for (what, files) in STOPS {
            // Without generation_config.json engines make one of config.json.
            let read = |token: &EndToken| {
                files.iter().any(|file| of(token, file))
                    || (!generation && of(token, "config.json"))
                    || (what == Observed::EndBeyondFiles && token.text.as_deref() == Some(BY_NAME))
            };
            let missed: Vec<&EndToken> = tokens.iter().filter(|token| !read(token)).collect();
            let Some(first) = missed.first() else { continue };
            let sources: Vec<String> = first.sources.iter().map(ToString::to_string).collect();
            let ids: Vec<String> = missed.iter().map(|token| token.id.to_string()).collect();
            let found = format!("no end at {} ({})", ids.join(", "), sources.join(", "));
            self.see(what, "generation_config.json: eos_token_id", found);
        }
    }

    /// Checks that every added token has a row in the embedding.
    fn token_rows(&mut self, config: &ModelConfig) {
        self.examined.push(Observed::TokenWithoutRow);
        let added = end_tokens::added_tokens(self.files.dir());
        let beyond: Vec<_> = added.iter().filter(|(id, _)| *id as usize >= config.vocab_size).collect();
        let Some((id, text)) = beyond.first() else { return };
        let found = format!(
            "{} tokens, the first is {} with id {id}; the embedding has {} rows",
            beyond.len(),
            Shown(text),
            config.vocab_size
        );
        self.see(Observed::TokenWithoutRow, "tokenizer.json: added_tokens", found);
    }

    /// Checks the ignore list of the config against tensor names.
    fn ignored_names(&mut self) {
        self.examined.push(Observed::IgnoredName);
        let tensors: Vec<&TensorMeta> = self.files.checkpoint().tensors().collect();
        for name in ignored_names(self.files.config()) {
            let plain = !name.starts_with("re:") && !name.contains(['*', '^', '\\']);
            // A tied head has no tensor, but ignore lists name it anyway.
            let absent = |prefix: String| !tensors.iter().any(|meta| meta.name.starts_with(&prefix));
            if plain && name.rsplit('.').next() != Some(HEAD) && absent(format!("{name}.")) {
                self.see(Observed::IgnoredName, name, "no tensor with this name");
            }
        }
    }

    /// Checks tensors of routers and of the KV cache.
    fn routers_and_caches(&mut self) {
        self.examined.extend([Observed::Router, Observed::CacheScale]);
        for meta in self.files.checkpoint().tensors() {
            let Some((module, part)) = QUANTIZED.iter().find_map(|end| {
                let module = meta.name.strip_suffix(end)?.strip_suffix('.')?;
                Some((module, *end))
            }) else {
                let cache = ["k_scale", "v_scale"].iter().any(|end| meta.name.ends_with(&format!(".{end}")));
                if cache && meta.numel() > 1 {
                    self.see(Observed::CacheScale, &meta.name, format!("shape {:?}", meta.shape));
                }
                continue;
            };
            if ["gate", "router"].contains(&module.rsplit('.').next().unwrap_or(module)) {
                self.see(Observed::Router, module, format!("a tensor {part}"));
            }
        }
    }

    /// Checks `checkpoint_format`. Symmetric GPTQ has one zero point, 2^(b-1), which reveals the version: v2
    /// stores it unchanged, v1 minus one.
    fn zero_points(&mut self) -> Result<()> {
        let Some(quantization) = self.files.config().and_then(|config| config.get("quantization_config"))
        else {
            return Ok(());
        };
        let bits = quantization.get("bits").and_then(Value::as_u64).and_then(|bits| u32::try_from(bits).ok());
        let Some(bits) = bits.filter(|bits| [2, 4, 8].contains(bits)) else { return Ok(()) };
        let symmetric = quantization.get("sym").and_then(Value::as_bool).unwrap_or(true);
        let zeros: Vec<String> = self
            .files
            .checkpoint()
            .tensors()
            .filter(|meta| meta.name.ends_with(".qzeros") && meta.dtype == Dtype::I32)
            .map(|meta| meta.name.clone())
            .collect();
        // AWQ stores zero points in another order, and as they are.
        if zeros.is_empty() || !symmetric || self.files.gptq().is_none() {
            return Ok(());
        }
        self.examined.push(Observed::ZeroPointVersion);
        let label = quantization.get("checkpoint_format").and_then(Value::as_str).unwrap_or("gptq");
        let (v1, v2) = ((1u8 << (bits - 1)) - 1, 1u8 << (bits - 1));
        let labelled = if label == "gptq_v2" { v2 } else { v1 };
        for name in zeros {
            let bytes = self.files.checkpoint().read(&name)?;
            let codes = Packing::rows(bits).unpack(&bytes, 1, bytes.len() * 8 / bits as usize, false);
            let codes = codes.unwrap_or_default();
            let all = |value: u8| codes.iter().all(|&code| code == value);
            let stored = [v1, v2].into_iter().find(|&value| all(value));
            if let Some(stored) = stored.filter(|&stored| stored != labelled) {
                let version = if stored == v2 { "gptq_v2" } else { "gptq" };
                let found =
                    format!("every zero point stored as {stored}, as in {version}, but labelled \"{label}\"");
                self.see(Observed::ZeroPointVersion, name, found);
            }
        }
        Ok(())
    }

    /// Adds the reader's own finding on zero points where single layers do not reveal the version: asymmetric
    /// codes, and widths that do not divide a word.
    fn zero_point_note(&mut self) {
        let what = Observed::ZeroPointVersion;
        if self.files.gptq().is_none() || self.examined.contains(&what) {
            return;
        }
        self.examined.push(what);
        for note in self.files.notes().into_iter().filter(|note| note.contains("checkpoint_format")) {
            self.see(what, "quantization_config.checkpoint_format", note);
        }
    }

    /// Checks for KV cache scales if the config asks for a quantized cache: engines use 1 for missing ones.
    fn cache_scales(&mut self, config: &ModelConfig) -> Result<()> {
        self.examined.push(Observed::NoCacheScale);
        for layer in (0..config.num_hidden_layers).filter(|layer| config.has_own_kv(*layer)) {
            let module = config.attention_module(layer);
            let heads = config.heads(layer).key_value;
            if self.files.kv_quant(&module, heads)?.is_none() {
                return Ok(());
            }
            // compressed-tensors stores them at the attention module, ModelOpt at the projections.
            for (scale, projection) in [("k_scale", "k_proj"), ("v_scale", "v_proj")] {
                let names = [format!("{module}.{scale}"), format!("{module}.{projection}.{scale}")];
                if !names.iter().any(|name| self.files.has(name)) {
                    let [name, _] = names;
                    self.see(
                        Observed::NoCacheScale,
                        name,
                        "no such tensor, but the config asks for a quantized KV cache",
                    );
                }
            }
        }
        Ok(())
    }

    /// Checks that `tokenizer_config.json` and `tokenizer.json` agree on the BOS token.
    fn bos_rule(&mut self) {
        let dir = self.files.dir();
        let Ok(tokenizer) = Tokenizer::load(dir) else { return };
        let Ok(Some(own)) = read_json(&dir.join("tokenizer_config.json")) else { return };
        let (Some(stated), Some(bos)) = (own.get("add_bos_token").and_then(Value::as_bool), tokenizer.bos())
        else {
            return;
        };
        let Ok(ids) = tokenizer.encode("a", Bos::Auto) else { return };
        self.examined.push(Observed::BosRule);
        if stated != (ids.first() == Some(&bos)) {
            let does = if stated { "adds none" } else { "adds one" };
            let found = format!("add_bos_token {stated}, but tokenizer.json {does}");
            self.see(Observed::BosRule, "tokenizer_config.json: add_bos_token", found);
        }
    }

    fn gguf_tensors(&mut self, model: &Model) {
        self.examined.push(Observed::Norm);
        for tensor in model.tensors().iter().filter(|tensor| tensor.shape.len() == 1) {
            if tensor.ty != GgmlType::F32 {
                self.see(Observed::Norm, &tensor.name, format!("type {}", tensor.ty.name));
            }
        }
    }

    fn gguf_tokenizer(&mut self, model: &Model, config: &ModelConfig) {
        let (kind, tokens) = ("tokenizer.ggml.model", "tokenizer.ggml.tokens");
        self.examined.extend([Observed::Tokenizer, Observed::NoVocabulary]);
        self.examined.extend([Observed::PreTokenizer, Observed::Vocabulary, Observed::OtherTokenizer]);
        let metadata = model.metadata();
        if let Some(difference) = metadata.get(TOKENIZER_NOTE).and_then(|value| value.as_str()) {
            self.see(Observed::OtherTokenizer, TOKENIZER_NOTE, difference);
        }
        // llama.cpp accepts both values (src/llama-vocab.cpp, llama_vocab::impl::load).
        if let Some(none @ ("no_vocab" | "none")) = metadata.get(kind).and_then(|value| value.as_str()) {
            return self.see(Observed::NoVocabulary, kind, format!("\"{none}\""));
        }
        for key in [kind, tokens] {
            if metadata.get(key).is_none() {
                self.see(Observed::Tokenizer, key, "no such key");
            }
        }
        self.gguf_token_rules(model, config);
        self.gguf_end_tokens(model);
    }

    /// Checks that the tokens that llama.cpp finds by their names are end tokens here: it does not ask for their type.
    fn gguf_end_tokens(&mut self, model: &Model) {
        self.examined.push(Observed::EndOfName);
        let Ok(ours) = EndTokens::of_metadata(model.metadata()) else { return };
        let ids = ours.ids();
        let texts = model.metadata().get("tokenizer.ggml.tokens").and_then(|value| value.as_array());
        let tokens =
            (0u32..).zip(texts.unwrap_or_default()).filter_map(|(id, text)| Some((id, text.as_str()?)));
        if let Some((id, text)) = named(tokens).find(|(id, _)| !ids.contains(id)) {
            let found = format!("{} is a plain token of id {id}: llama.cpp ends there", Shown(text));
            self.see(Observed::EndOfName, "tokenizer.ggml.token_type", found);
        }
        self.examined.push(Observed::EndByDefault);
        let key = GGUF_KEYS[0];
        let kind = model.metadata().get("tokenizer.ggml.model").and_then(|value| value.as_str());
        let default = kind.filter(|_| model.metadata().get(key).is_none()).and_then(default_of);
        if let Some(id) = default.filter(|id| !ids.contains(id)) {
            let text = texts.and_then(|texts| texts.get(id as usize)?.as_str()).unwrap_or_default();
            let found = format!("no such key, and the default, {id}, is {} of no control type", Shown(text));
            self.see(Observed::EndByDefault, key, found);
        }
    }

    /// Checks pre-tokenizer, BOS rule and vocabulary of a GGUF tokenizer.
    fn gguf_token_rules(&mut self, model: &Model, config: &ModelConfig) {
        let (kind, tokens) = ("tokenizer.ggml.model", "tokenizer.ggml.tokens");
        let metadata = model.metadata();
        let bpe = metadata.get(kind).and_then(|value| value.as_str()) == Some("gpt2");
        if bpe && metadata.get("tokenizer.ggml.pre").is_none() {
            self.see(
                Observed::PreTokenizer,
                "tokenizer.ggml.pre",
                "no such key next to a byte-level tokenizer",
            );
        }
        self.examined.push(Observed::BosRule);
        let has = |key: &str| metadata.get(key).is_some();
        if has("tokenizer.ggml.bos_token_id") && !has("tokenizer.ggml.add_bos_token") {
            let field = "tokenizer.ggml.add_bos_token";
            self.see(Observed::BosRule, field, "no such key next to tokenizer.ggml.bos_token_id");
        }
        let listed = metadata.get(tokens).and_then(|value| value.as_array()).map(<[_]>::len);
        if let Some(n) = listed.filter(|&n| n != config.vocab_size) {
            let found = format!("{n} tokens, {} embedding rows", config.vocab_size);
            self.see(Observed::Vocabulary, tokens, found);
        }
    }

    /// Compares q and k with the source in the architecture's row order and in the other one.
    fn row_order(&mut self, model: &Model, config: &ModelConfig, reference: &ModelFiles) -> Result<()> {
        self.examined.push(Observed::RowOrder);
        let interleaved = model.row_order().interleaved.is_some();
        for info in config.linears() {
            let Some(heads) = rotated_heads(&info, config) else { continue };
            let ours = self.values(self.files, &info)?;
            let theirs = self.values(reference, &info)?;
            // The reader has undone the architecture's permutation; apply it again to get the stored order.
            let other = match interleaved {
                true => to_gguf_order(&ours, info.cols, heads),
                false => to_hf_order(&ours, info.cols, heads),
            };
            let (as_read, otherwise) = (relative_error(&ours, &theirs), relative_error(&other, &theirs));
            if otherwise < 0.5 * as_read {
                let what = if interleaved { "not interleaved" } else { "interleaved" };
                let found = format!(
                    "q and k rows {what}: relative error to the source {as_read:.3}, in the other order {otherwise:.3}"
                );
                let name = format!("{}.weight", info.module);
                let stored = stored_name(&name).unwrap_or(name);
                self.see(Observed::RowOrder, stored, found);
            }
        }
        Ok(())
    }

    fn values(&self, files: &ModelFiles, info: &LinearInfo) -> Result<Vec<f32>> {
        let weight = files.linear(&info.module, info.rows, info.cols, false)?;
        Ok(values(&info.module, weight)?)
    }
}

/// Returns the number of heads if RoPE applies to the layer's output.
pub(crate) fn rotated_heads(info: &LinearInfo, config: &ModelConfig) -> Option<usize> {
    let heads =
        [(LinearKind::Q, config.num_attention_heads), (LinearKind::K, config.heads(info.layer).key_value)];
    heads.into_iter().find(|(kind, _)| *kind == info.kind).map(|(_, heads)| heads)
}

/// Returns the ignored modules of the config, under the key of any known format.
fn ignored_names(config: Option<&Value>) -> Vec<String> {
    let Some(quantization) = config.and_then(|config| config.get("quantization_config")) else {
        return Vec::new();
    };
    let lists = ["ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"];
    let listed = lists.iter().filter_map(|key| quantization.get(key)?.as_array()).flatten();
    listed.filter_map(|name| name.as_str().map(str::to_owned)).collect()
}

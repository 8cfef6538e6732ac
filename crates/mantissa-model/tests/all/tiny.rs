//! The committed tiny models, one per feature of an architecture, against the logits of transformers.
use crate::common::{expected, load, logits, max_difference, sampled, tiny};
use mantissa_model::{
    Batch, Buffers, Decoder, ForwardError, GenerateOptions, KvCache, LoadError, Sampling, SourceView,
    WeightSource, generate,
};
use mantissa_store::convention::{LinearWeight, ModelFiles};

/// Tolerance for float32 logits of magnitude up to a few units, from transformers in float32.
const TOLERANCE: f32 = 1e-4;

#[test]
fn logits_agree_with_transformers() {
    for dir in tiny() {
        let (sequences, expected) = expected(&dir);
        let difference = max_difference(&logits(&load(&dir), &sequences), &expected);
        println!("{:32} {difference:.1e}", dir.file_name().unwrap().display());
        assert!(difference <= TOLERANCE, "{}: {difference}", dir.display());
    }
}

#[test]
fn the_class_of_an_architecture_is_that_of_transformers() {
    for dir in tiny() {
        let config = std::fs::read_to_string(dir.join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        let class = load(&dir).config().class();
        assert_eq!(config["architectures"], serde_json::json!([class]), "{}", dir.display());
    }
}

/// A checkpoint under the names that DeepSeek publishes, where transformers writes others.
struct Published(ModelFiles);

impl Published {
    fn written(name: &str) -> String {
        let name = name.replace(".attn.kv_norm.", ".attn.norm.").replace("hc_head_", "model.hc_head.hc_");
        match name.strip_prefix("embed.") {
            Some(rest) => format!("model.embed_tokens.{rest}"),
            None if name.starts_with("layers.") || name.starts_with("norm.") => format!("model.{name}"),
            None => name,
        }
    }
}

impl SourceView for Published {
    fn base(&self) -> &dyn WeightSource {
        &self.0
    }

    fn has(&self, tensor: &str) -> bool {
        !tensor.starts_with("model.") && self.0.has(&Self::written(tensor))
    }

    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        self.base().tensor_f32(&Self::written(tensor), shape)
    }

    fn integers(&self, tensor: &str, shape: &[usize]) -> Result<Vec<u32>, LoadError> {
        self.base().integers(&Self::written(tensor), shape)
    }

    fn linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> Result<LinearWeight, LoadError> {
        self.base().linear(Self::written(&format!("{module}.")).trim_end_matches('.'), rows, cols, bias)
    }
}

#[test]
fn published_names_are_read() {
    let dir = tiny().into_iter().find(|dir| dir.ends_with("deepseek-v4")).unwrap();
    let published = Decoder::load(&Published(ModelFiles::open(&dir).unwrap())).unwrap();
    let (sequences, _) = expected(&dir);
    assert_eq!(logits(&published, &sequences), logits(&load(&dir), &sequences));
    let names: Vec<_> = published.config().tensors().into_iter().map(|tensor| tensor.name).collect();
    assert!(names.iter().all(|name| !name.starts_with("model.")), "{names:?}");
    for name in
        ["embed.weight", "layers.1.attn.kv_norm.weight", "hc_head_scale", "norm.weight", "head.weight"]
    {
        assert!(names.iter().any(|known| known == name), "{name}");
    }
}

/// Computes the logits of every token of one sequence, through the cache in pieces of the given lengths (the last
/// repeats).
fn cached(decoder: &Decoder, tokens: &[u32], pieces: &[usize]) -> Vec<f32> {
    let config = decoder.config();
    let mut cache = KvCache::plan(config, tokens.len()).unwrap();
    let mut buffers = Buffers::plan(config, tokens.len(), tokens.len()).unwrap();
    let mut out = vec![f32::NAN; tokens.len() * config.vocab_size];
    let mut pieces = pieces.iter().chain(std::iter::repeat(pieces.last().unwrap()));
    while cache.len() < tokens.len() {
        let start = cache.len();
        let end = tokens.len().min(start + pieces.next().unwrap());
        let mut hidden = decoder.forward_cached(&tokens[start..end], &mut cache, &mut buffers).unwrap();
        let out = &mut out[start * config.vocab_size..end * config.vocab_size];
        hidden.logits(0..end - start, out).unwrap();
    }
    out
}

#[test]
fn cached_logits_match_the_full_pass() {
    for dir in tiny() {
        let decoder = load(&dir);
        let (sequences, _) = expected(&dir);
        let full = logits(&decoder, &sequences[..1]);
        for pieces in [&[1][..], &[5, 1], &[3, 4], &[1000]] {
            let difference = max_difference(&cached(&decoder, &sequences[0], pieces), &full);
            assert!(difference <= 1e-5, "{} in {pieces:?}: {difference}", dir.display());
        }
    }
}

/// Generates one token at a time through the cache, past windows, with sinks and latents. The tokens must be those
/// that one pass over the whole text would choose.
#[test]
fn greedy_text_matches_the_full_pass() {
    for dir in tiny() {
        let decoder = load(&dir);
        let (sequences, _) = expected(&dir);
        let prompt = &sequences[0][..5];
        let options = GenerateOptions {
            max_new_tokens: 30,
            sampling: Sampling::default(),
            stop: Vec::new(),
            ignore_eos: true,
        };
        let found = generate(&decoder, prompt, &options, |_| std::ops::ControlFlow::Continue(())).unwrap();
        let text = [prompt, &found.tokens].concat();
        let all = logits(&decoder, std::slice::from_ref(&text));
        let rows = all.chunks_exact(decoder.config().vocab_size).skip(prompt.len() - 1);
        for (i, (row, &token)) in rows.zip(&found.tokens).enumerate() {
            let best = row.iter().fold(f32::NEG_INFINITY, |best, &v| best.max(v));
            // Equal up to rounding: either is right.
            assert!(best - row[token as usize] <= 1e-5, "{}: token {i}", dir.display());
        }
    }
}

#[test]
fn a_sequence_has_the_same_bits_alone_and_in_a_batch() {
    for dir in sampled(tiny(), 3) {
        let decoder = load(&dir);
        let config = decoder.config();
        let (sequences, _) = expected(&dir);
        // Long enough together for the MLP to split the rows.
        let lens = [[1, 0, 7, 2, 64, 3], [64; 6]].concat();
        let sum: usize = lens.iter().sum::<usize>();
        let all: Vec<u32> = sequences.concat().into_iter().cycle().take(sum + 500).collect();
        let lens = [&lens[..], &[50; 10]].concat();
        let mut buffers = Buffers::plan(config, all.len(), 64).unwrap();
        let states = |tokens: &[u32], lens: &[usize], buffers: &mut Buffers| {
            decoder.forward(&Batch { tokens, lens }, buffers).unwrap().states().to_vec()
        };
        let batch = states(&all, &lens, &mut buffers);
        let mut first = 0;
        for len in lens {
            let alone = states(&all[first..first + len], &[len], &mut buffers);
            let expected = &batch[first * config.hidden_size..][..alone.len()];
            let same = alone.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{}: sequence of {len}", dir.display());
            first += len;
        }
    }
}

#[test]
fn wrong_calls_are_errors() {
    let decoder = load(&tiny()[0]);
    let config = decoder.config();
    let mut buffers = Buffers::plan(config, 8, 4).unwrap();
    let mut error = |tokens: &[u32], lens: &[usize]| {
        decoder.forward(&Batch { tokens, lens }, &mut buffers).map(|h| h.tokens()).unwrap_err()
    };
    let vocab_size = config.vocab_size;
    let token = vocab_size as u32;
    assert_eq!(error(&[0, token], &[2]), ForwardError::Vocabulary { index: 1, token, vocab_size });
    assert_eq!(error(&[0, 1], &[1]), ForwardError::Lengths { sum: 1, tokens: 2 });
    assert_eq!(error(&[0, 1], &[usize::MAX, 3]), ForwardError::Lengths { sum: usize::MAX, tokens: 2 });
    assert!(matches!(error(&[0; 9], &[3, 3, 3]), ForwardError::Plan { needed: 9, planned: 8, .. }));
    assert!(matches!(error(&[0; 5], &[5]), ForwardError::Plan { needed: 5, planned: 4, .. }));

    let mut cache = KvCache::plan(config, 3).unwrap();
    let mut run =
        |tokens: &[u32]| decoder.forward_cached(tokens, &mut cache, &mut buffers).map(|h| h.tokens());
    assert_eq!(run(&[1, 2]), Ok(2));
    assert!(matches!(run(&[1, 2]), Err(ForwardError::Plan { needed: 4, planned: 3, .. })));
    assert!(run(&[token]).is_err());
    assert_eq!(run(&[3]), Ok(1), "errors leave the cache as it was");

    let other = tiny().into_iter().find(|dir| dir.ends_with("gpt2")).map(|dir| load(&dir)).unwrap();
    let refused = other.forward(&Batch { tokens: &[0], lens: &[1] }, &mut buffers).map(|h| h.tokens());
    assert_eq!(refused, Err(ForwardError::OtherModel { what: "buffers" }));
}

#[test]
fn plans_beyond_the_model_or_the_memory_are_errors() {
    let decoder = load(&tiny()[0]);
    let config = decoder.config();
    let too_long = config.max_position_embeddings + 1;
    assert!(KvCache::plan(config, too_long).unwrap_err().to_string().contains("max_position_embeddings"));
    assert!(Buffers::plan(config, 1, too_long).is_err());
    let error = Buffers::plan(config, usize::MAX / 1024, 8).unwrap_err();
    assert!(error.to_string().contains("of free memory"), "{error}");
    assert_eq!(KvCache::bytes_needed(config, 10), 10 * 2 * 2 * 4 * config.key_value_width() as u64);
}

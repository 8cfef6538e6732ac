//! A tied head that is stored in place of the embedding, as tools do that keep one of two shared tensors.

use mantissa_arch::Architecture;
use mantissa_arch::wrapper::Wrapper;

use crate::view::Viewed;
use crate::{Checkpoint, TensorMeta};

impl Checkpoint {
    /// Presents a tied head as the embedding if the embedding is missing, as transformers 5 does (`tie_weights`). Other
    /// checkpoints are returned unchanged.
    pub(super) fn with_embedding(self) -> Self {
        let Some((head, embedding)) = self.stored_head() else { return self };
        let renamed = |meta: &TensorMeta| {
            let part = meta.name.strip_prefix(head).filter(|part| part.starts_with('.') && *part != ".bias");
            let name = part.map_or_else(|| meta.name.clone(), |part| format!("{embedding}{part}"));
            Viewed { stored: meta.name.clone(), meta: TensorMeta { name, ..meta.clone() }, view: None }
        };
        let tensors = self.tensors().map(renamed).collect();
        let note = format!(
            "{}: tensor \"{embedding}.weight\": expected one, got none; the tied {head} is read in its place, as in transformers 5",
            self.dir().display()
        );
        let config = self.config().cloned();
        self.viewed(tensors, config).with_warning(note)
    }

    /// Returns head and embedding if the head is tied and the only one of the two that is stored.
    fn stored_head(&self) -> Option<(&'static str, String)> {
        let config = self.config()?;
        let architecture = Architecture::of_config(config)?;
        if Wrapper::find(config["model_type"].as_str()?).is_some() {
            return None;
        }
        let tied = config.get("tie_word_embeddings").and_then(serde_json::Value::as_bool);
        let names = &architecture.names;
        let embedding = format!("{}{}", names.root, names.embedding);
        let has = |module: &str| {
            let weight =
                |meta: &TensorMeta| meta.name.strip_prefix(module).is_some_and(|part| part.starts_with('.'));
            self.tensors().any(weight)
        };
        let others = names.published.unwrap_or(names).embedding;
        let lone = !has(&embedding) && !has(others) && !has(names.embedding) && has(names.head);
        (tied.unwrap_or(architecture.tied) && lone).then_some((names.head, embedding))
    }
}

//! Check that `mantissa run` can open a model: all files and tensors exist and parse. Headers and small files are read,
//! weights are not.

use std::path::Path;

use mantissa_kernels::give_back_memory;
use mantissa_model::{
    LinearInfo, ModelConfig, Role, StoredAs, Tokenizer, TokenizerError, load_config, require_head,
};
use mantissa_store::convention::ModelFiles;

use crate::error::Result;

/// Checks the model folder or GGUF file `model`: index and headers, `config.json`, `generation_config.json`, every
/// tensor of the architecture with its shape, side tensors of quantized layers, and the tokenizer, if there is one.
///
/// # Errors
/// [`QuantError`](crate::QuantError) names the file and the tensor or field at fault.
pub fn load_check(model: &Path) -> Result<()> {
    let files = ModelFiles::open(model)?;
    loadable(&files)?;
    let named = files.gguf().and_then(|model| model.metadata().get("tokenizer.ggml.tokens"));
    if named.is_some() {
        dropped(Tokenizer::load(files.dir()))?;
    }
    Ok(())
}

/// Like [`load_check`], for a GGUF file whose tokenizer cannot be read and that runs on token ids.
///
/// # Errors
/// Errors of [`load_check`].
pub(crate) fn load_check_of_ids(model: &Path) -> Result<()> {
    loadable(&ModelFiles::open(model)?)
}

/// Checks a source whose headers were read, like [`load_check`]. The tokenizer in GGUF metadata is left out, because no
/// output copies it.
///
/// # Errors
/// Errors of [`load_check`].
pub(crate) fn loadable(files: &ModelFiles) -> Result<()> {
    // Includes the token ids of generation_config.json.
    let config = load_config(files)?;
    require_head(&config, files)?;
    // Linear layers one by one first: a config may name more layers than memory has room to list.
    for info in config.decoder_linears() {
        check_linear(files, &info)?;
    }
    for info in config.tensors() {
        match info.role {
            // Checked with its layer.
            Role::Linear { .. } | Role::Bias { .. } | Role::Stacked { .. } => {}
            Role::Embedding | Role::Head | Role::Positions | Role::Side { .. } => {
                let module = info.name.strip_suffix(".weight").unwrap_or(&info.name);
                let &[rows, cols] = info.shape.as_slice() else { continue };
                files.check_linear(module, rows, cols, false)?;
            }
            Role::Vector { kind, .. } if kind.is_integer() => {
                files.check_integers(&info.name, &info.shape)?;
            }
            _ => files.check_tensor(&info.name, &info.shape)?,
        }
    }
    check_caches(files, &config)?;
    check_tokenizer(files)
}

/// Checks a linear layer as [`mantissa_model::linear_weight`] reads it.
fn check_linear(files: &ModelFiles, info: &LinearInfo) -> Result<()> {
    let LinearInfo { module, rows, cols, bias, stored, .. } = info;
    let (rows, cols, by_rows) = (*rows, *cols, info.is_by_rows(files));
    match stored {
        StoredAs::Stacked(stack) => {
            if *bias {
                files
                    .check_tensor(&format!("{}_bias", stack.tensor), &[stack.experts, stack.turns * rows])?;
            }
            match by_rows {
                true => files.check_linear(module, rows, cols, false)?,
                false => files.check_expert(stack, rows, cols)?,
            }
        }
        StoredAs::Columns if !by_rows => {
            files.check_tensor(&format!("{module}.weight"), &[cols, rows])?;
            if *bias {
                files.check_tensor(&format!("{module}.bias"), &[rows])?;
            }
        }
        _ => files.check_linear(module, rows, cols, *bias)?,
    }
    Ok(())
}

/// Checks scales of keys and values by reading them: they are a few numbers per layer.
fn check_caches(files: &ModelFiles, config: &ModelConfig) -> Result<()> {
    for layer in (0..config.num_hidden_layers).filter(|layer| config.has_own_kv(*layer)) {
        files.kv_quant(&config.attention_module(layer), config.heads(layer).key_value)?;
    }
    Ok(())
}

/// Checks the tokenizer of a folder with its configuration and templates. A model without one runs on token ids.
fn check_tokenizer(files: &ModelFiles) -> Result<()> {
    if files.gguf().is_some() {
        return Ok(());
    }
    match dropped(Tokenizer::load(files.dir())) {
        Ok(()) | Err(TokenizerError::Missing { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Drops a tokenizer that was loaded to see whether it loads, and returns its memory to the system: its small blocks would
/// otherwise be held beside the weights.
pub(crate) fn dropped(
    loaded: std::result::Result<Tokenizer, TokenizerError>,
) -> std::result::Result<(), TokenizerError> {
    let checked = loaded.map(drop);
    give_back_memory();
    checked
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use mantissa_store::{Dtype, SafeTensors, SafetensorsWriter, TensorSpec};

    use super::*;

    fn data() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny")
    }

    /// Copies a small model with its tokenizer.
    fn copy(dir: &Path) {
        let from = data().join("llama2-gqa-tied");
        for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
            fs::copy(from.join(name), dir.join(name)).unwrap();
        }
    }

    /// Rewrites the small model's weights; `change` gets every tensor and returns it changed, or `None` to drop it.
    fn rewrite(dir: &Path, change: impl Fn(TensorSpec) -> Option<TensorSpec>) {
        let from = SafeTensors::open(&data().join("llama2-gqa-tied/model.safetensors")).unwrap();
        let specs = from.tensors().iter().map(|t| TensorSpec::new(&t.name, t.dtype, t.shape.clone()));
        let specs: Vec<_> = specs.filter_map(change).collect();
        fs::remove_file(dir.join("model.safetensors")).unwrap();
        let mut writer =
            SafetensorsWriter::create(&dir.join("model.safetensors"), specs.clone(), Default::default())
                .unwrap();
        for spec in specs {
            let bytes = usize::try_from(crate::plan::spec_bytes(&spec)).unwrap();
            writer.write(&spec.name, &vec![0; bytes]).unwrap();
        }
        writer.finish().unwrap();
    }

    #[test]
    fn every_architecture_that_runs_passes() {
        let mut models = 0;
        for entry in fs::read_dir(data()).unwrap() {
            load_check(&entry.unwrap().path()).unwrap();
            models += 1;
        }
        assert!(models >= 27, "{models}");
        load_check(&data().join("../../../fuzz/seeds/gguf/model.gguf")).unwrap();
    }

    #[test]
    fn a_missing_or_misshapen_tensor_is_named() {
        let dir = tempfile::tempdir().unwrap();
        copy(dir.path());
        let whole = SafeTensors::open(&dir.path().join("model.safetensors")).unwrap();
        for name in whole.tensors().iter().map(|t| t.name.as_str()) {
            let others = |spec: TensorSpec| (spec.name != name).then_some(spec);
            let longer = |spec: TensorSpec| {
                let more = usize::from(spec.name == name);
                Some(TensorSpec { shape: spec.shape.iter().map(|n| n + more).collect(), ..spec })
            };
            let codes = |spec: TensorSpec| {
                Some(if spec.name == name { TensorSpec { dtype: Dtype::I8, ..spec } } else { spec })
            };
            for change in [&others as &dyn Fn(_) -> _, &longer, &codes] {
                rewrite(dir.path(), change);
                let error = load_check(dir.path()).unwrap_err();
                assert!(error.to_string().contains(name), "{name}: {error}");
                assert_eq!(error.class(), mantissa_store::ErrorClass::Input);
            }
        }
        rewrite(dir.path(), Some);
        load_check(dir.path()).unwrap();
    }

    #[test]
    fn a_file_beside_the_weights_that_does_not_parse_is_named() {
        let dir = tempfile::tempdir().unwrap();
        copy(dir.path());
        load_check(dir.path()).unwrap();
        for (name, content) in [
            ("generation_config.json", "{"),
            ("generation_config.json", "[]"),
            ("generation_config.json", r#"{"eos_token_id": "x"}"#),
            ("generation_config.json", r#"{"bos_token_id": -1}"#),
            ("tokenizer.json", "{"),
            ("tokenizer.json", "{}"),
            ("tokenizer_config.json", "[1,"),
            ("config.json", "{}"),
            ("config.json", "{"),
            ("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"),
        ] {
            let path = dir.path().join(name);
            let before = fs::read(&path).ok();
            fs::write(&path, content).unwrap();
            let error = load_check(dir.path()).unwrap_err().to_string();
            assert!(error.contains(name), "{name} {content}: {error}");
            match before {
                Some(bytes) => fs::write(&path, bytes).unwrap(),
                None => fs::remove_file(&path).unwrap(),
            }
        }
        fs::remove_file(dir.path().join("config.json")).unwrap();
        assert!(load_check(dir.path()).unwrap_err().to_string().contains("config.json"));
        // A model without a tokenizer runs on token ids.
        copy(dir.path());
        fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
        load_check(dir.path()).unwrap();
    }

    #[test]
    fn an_index_must_agree_with_its_shards() {
        let dir = tempfile::tempdir().unwrap();
        copy(dir.path());
        let shard = "model-00001-of-00001.safetensors";
        fs::rename(dir.path().join("model.safetensors"), dir.path().join(shard)).unwrap();
        let index = dir.path().join("model.safetensors.index.json");
        let names: Vec<_> = SafeTensors::open(&dir.path().join(shard))
            .unwrap()
            .tensors()
            .iter()
            .map(|t| t.name.clone())
            .collect();
        let map = |extra: Option<&str>| {
            let all = names.iter().map(String::as_str).chain(extra);
            let map: serde_json::Map<_, _> = all.map(|name| (name.to_owned(), shard.into())).collect();
            serde_json::json!({ "weight_map": map }).to_string()
        };
        fs::write(&index, map(None)).unwrap();
        load_check(dir.path()).unwrap();
        fs::write(&index, map(Some("model.more.weight"))).unwrap();
        assert!(load_check(dir.path()).unwrap_err().to_string().contains("model.more.weight"));
        fs::write(&index, map(None).replace(shard, "model-00002-of-00002.safetensors")).unwrap();
        assert!(load_check(dir.path()).unwrap_err().to_string().contains("model-00002-of-00002.safetensors"));
    }
}

//! Reading: settings and headers first, then the tensors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::config::Config;
use super::{Adapter, AdapterModule, CONFIG_NAME, PREFIX, Replaced, WEIGHTS_NAME};
use crate::error::{Error, ForeignKind, Result};
use crate::json::read_strict;
use crate::safetensors::{SafeTensors, TensorMeta, shape_text};
use crate::shards::MAX_CONFIG_BYTES;

/// An opened adapter folder: settings and headers checked, no tensor read.
#[derive(Debug)]
pub struct AdapterFiles {
    dir: PathBuf,
    config: Config,
    file: SafeTensors,
    modules: BTreeMap<String, ModuleTensors>,
    /// Names in the file of tensors that replace tensors of the base model.
    replaced: BTreeMap<String, String>,
}

/// Names in the file of one module's tensors.
#[derive(Debug, Default)]
struct ModuleTensors {
    a: Option<String>,
    b: Option<String>,
    magnitude: Option<String>,
}

/// Part of an adapter that a tensor holds.
enum Role<'n> {
    A(&'n str),
    B(&'n str),
    Magnitude(&'n str),
    Replaced(String),
}

impl AdapterFiles {
    /// Opens the adapter folder `dir`.
    ///
    /// # Errors
    /// [`Error::Missing`] if it is no adapter folder, [`Error::Foreign`] for pickled tensors, [`Error::Field`] for settings
    /// and tensors that are not LoRA or DoRA on linear layers; else as [`SafeTensors::open`].
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(CONFIG_NAME);
        let value = read_strict(&path, MAX_CONFIG_BYTES, "a PEFT adapter folder with adapter_config.json")?;
        let config = Config::parse(&path, &value)?;
        let weights = dir.join(WEIGHTS_NAME);
        let pickled = dir.join("adapter_model.bin");
        if !weights.exists() && pickled.exists() {
            return Err(Error::Foreign { path: pickled, kind: ForeignKind::Pickle });
        }
        let file = SafeTensors::open(&weights)?;
        let (mut modules, mut replaced) = (BTreeMap::<String, ModuleTensors>::new(), BTreeMap::new());
        for meta in file.tensors() {
            let stored = || Some(meta.name.clone());
            let (module, part) = match role(&weights, &meta.name)? {
                Role::Replaced(name) => {
                    replaced.insert(name, meta.name.clone());
                    continue;
                }
                Role::A(module) => (module, ModuleTensors { a: stored(), ..ModuleTensors::default() }),
                Role::B(module) => (module, ModuleTensors { b: stored(), ..ModuleTensors::default() }),
                Role::Magnitude(module) => {
                    (module, ModuleTensors { magnitude: stored(), ..ModuleTensors::default() })
                }
            };
            let held = modules.entry(module.to_owned()).or_default();
            held.a = held.a.take().or(part.a);
            held.b = held.b.take().or(part.b);
            held.magnitude = held.magnitude.take().or(part.magnitude);
        }
        if modules.is_empty() && replaced.is_empty() {
            let allowed = "tensors such as base_model.model.….lora_A.weight";
            return Err(Error::field(
                &weights,
                "tensors",
                "none",
                allowed,
                "fix: save the adapter with save_pretrained",
            ));
        }
        let files = AdapterFiles { dir: dir.to_owned(), config, file, modules, replaced };
        files.modules.iter().try_for_each(|(name, parts)| files.check(name, parts))?;
        Ok(files)
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Names of the adapted modules.
    pub fn modules(&self) -> impl Iterator<Item = &str> {
        self.modules.keys().map(String::as_str)
    }

    /// Names of the tensors that replace tensors of the base model.
    pub fn replaced(&self) -> impl Iterator<Item = &str> {
        self.replaced.keys().map(String::as_str)
    }

    /// True if rows are scaled to learned norms.
    pub fn is_dora(&self) -> bool {
        self.config.dora
    }

    /// Bytes of all tensors as f32, which [`load`](Self::load) allocates.
    pub fn bytes(&self) -> u64 {
        self.file
            .tensors()
            .iter()
            .fold(0, |sum: u64, meta| sum.saturating_add(meta.numel().saturating_mul(4)))
    }

    /// Reads the tensors.
    ///
    /// # Errors
    /// [`Error::NotFloat`], [`Error::NonFinite`], [`Error::Memory`], [`Error::Io`].
    pub fn load(&self) -> Result<Adapter> {
        let module = |(name, parts): (&String, &ModuleTensors)| {
            let (a, b) = (self.require(name, &parts.a, "lora_A")?, self.require(name, &parts.b, "lora_B")?);
            let (rank, alpha) = self.config.of_module(name);
            let magnitude = parts.magnitude.as_ref().and_then(|name| self.file.get(name));
            let module = AdapterModule {
                rows: b.shape.first().copied().unwrap_or(0),
                cols: a.shape.get(1).copied().unwrap_or(0),
                rank,
                alpha,
                rank_stabilized: self.config.rank_stabilized,
                a: self.values(a)?,
                b: self.values(b)?,
                magnitude: magnitude.map(|meta| self.values(meta)).transpose()?,
            };
            Ok((name.clone(), module))
        };
        let replaced = |(name, stored): (&String, &String)| {
            let Some(meta) = self.file.get(stored) else {
                return Err(Error::NoTensor { path: self.file.path().to_owned(), tensor: stored.clone() });
            };
            Ok((name.clone(), Replaced { shape: meta.shape.clone(), values: self.values(meta)? }))
        };
        Ok(Adapter {
            settings: self.config.settings.clone(),
            modules: self.modules.iter().map(module).collect::<Result<_>>()?,
            replaced: self.replaced.iter().map(replaced).collect::<Result<_>>()?,
        })
    }

    fn values(&self, meta: &TensorMeta) -> Result<Vec<f32>> {
        let values = self.file.read_f32(meta)?;
        crate::finite::require_finite(&values, self.file.path(), &meta.name)?;
        Ok(values)
    }

    /// Returns the tensor of a part of a module.
    fn require(&self, module: &str, stored: &Option<String>, part: &str) -> Result<&TensorMeta> {
        let found = stored.as_ref().and_then(|name| self.file.get(name));
        found.ok_or_else(|| {
            let tensor = format!("{PREFIX}{module}.{part}.weight");
            Error::NoTensor { path: self.file.path().to_owned(), tensor }
        })
    }

    /// Checks that the settings select the module, and the shapes of its tensors.
    fn check(&self, module: &str, parts: &ModuleTensors) -> Result<()> {
        let path = self.dir.join(CONFIG_NAME);
        if !self.config.selects(module) {
            let targets = self.config.settings.target_modules.join(", ");
            let allowed = format!("a name that selects {module}, which has tensors");
            return Err(Error::field(&path, "target_modules", targets, allowed, "fix: add its name"));
        }
        let (a, b) = (self.require(module, &parts.a, "lora_A")?, self.require(module, &parts.b, "lora_B")?);
        let (rank, _) = self.config.of_module(module);
        let wrong = |meta: &TensorMeta, allowed: String| {
            let hint = "fix: set r or rank_pattern of adapter_config.json to the rank of the tensors";
            let field = format!("tensor \"{}\": shape", meta.name);
            Error::field(self.file.path(), field, shape_text(&meta.shape), allowed, hint)
        };
        if !matches!(*a.shape, [r, cols] if r == rank && cols > 0) {
            return Err(wrong(a, format!("[{rank}, inputs], as the rank in {CONFIG_NAME}")));
        }
        let [rows, _] = *b.shape else { return Err(wrong(b, format!("[outputs, {rank}]"))) };
        if b.shape[1] != rank || rows == 0 {
            return Err(wrong(b, format!("[outputs, {rank}], as the rank in {CONFIG_NAME}")));
        }
        let magnitude = parts.magnitude.as_ref().and_then(|name| self.file.get(name));
        match magnitude {
            None if self.config.dora => {
                let tensor = format!("{PREFIX}{module}.lora_magnitude_vector");
                Err(Error::NoTensor { path: self.file.path().to_owned(), tensor })
            }
            Some(meta) if !self.config.dora => {
                let found = format!("false, with tensor \"{}\"", meta.name);
                Err(Error::field(
                    &path,
                    "use_dora",
                    found,
                    "true where there are magnitudes",
                    "fix: set it to true",
                ))
            }
            Some(meta) if *meta.shape != [rows] => {
                let field = format!("tensor \"{}\": shape", meta.name);
                let allowed = format!("[{rows}], the outputs of lora_B");
                Err(Error::field(self.file.path(), field, shape_text(&meta.shape), allowed, ""))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the part of the adapter that a tensor holds, by its name.
fn role<'n>(path: &Path, name: &'n str) -> Result<Role<'n>> {
    let fault = |found: &str, allowed: &str, hint: &str| {
        Error::field(path, format!("tensor \"{name}\""), found, allowed, hint)
    };
    let Some(rest) = name.strip_prefix(PREFIX) else {
        return Err(fault(
            "another name",
            &format!("a name that begins with {PREFIX}"),
            "fix: save it with save_pretrained",
        ));
    };
    let plain = rest.strip_suffix(".weight").unwrap_or(rest);
    if let Some(module) = rest.strip_suffix(".lora_A.weight") {
        return Ok(Role::A(module));
    }
    if let Some(module) = rest.strip_suffix(".lora_B.weight") {
        return Ok(Role::B(module));
    }
    if let Some(module) = plain.strip_suffix(".lora_magnitude_vector") {
        return Ok(Role::Magnitude(module));
    }
    if rest.contains("lora_embedding_") {
        let hint = "fix: merge the adapter with peft (merge_and_unload) and run the merged model";
        return Err(fault("an adapter of an embedding", "adapters of linear layers", hint));
    }
    let replaces = rest.ends_with(".weight") || rest.ends_with(".bias");
    if !replaces || rest.contains(".lora_") {
        let allowed = "lora_A.weight, lora_B.weight, lora_magnitude_vector, or a weight or bias of the base";
        return Err(fault("an unknown part", allowed, "fix: save plain LoRA or DoRA with save_pretrained"));
    }
    // The wrapper's name of a module that is stored whole, and of the weight under an adapter.
    Ok(Role::Replaced(rest.replace(".modules_to_save.", ".").replace(".base_layer.", ".")))
}

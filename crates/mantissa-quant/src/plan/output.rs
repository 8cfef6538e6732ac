//! What the output says of itself beside its weights: `config.json`, metadata and the files that some containers have.

use std::collections::BTreeMap;

use mantissa_model::{LinearInfo, ModelConfig, Role};
use mantissa_num::{Blocks, Format, Scheme};
use mantissa_store::convention::{
    Container, ModelFiles, NotStorable, awq, bitsandbytes, compressed_tensors, exl2, exl3, fp8, gpt_oss,
    gptq as gptq_files, mlx, modelopt, native, onnx,
};
use serde_json::Value;

use super::{Plan, model_not_storable};
use crate::convert::named_class;
use crate::error::Result;
use crate::rotate;

/// A scheme, that of the inputs, and the modules that have them.
type ModuleGroup = (Scheme, Option<Scheme>, Vec<String>);

impl Plan {
    /// The `config.json` of the output: the source's, with `quantization_config`.
    pub(crate) fn output_config(&self, source: &ModelFiles) -> Result<Value> {
        let mut config = source.config().cloned().unwrap_or_default();
        if source.gguf().is_some() {
            named_class(&mut config);
        }
        let kept = self.kept();
        let fault = |e: NotStorable| model_not_storable(self.container, e.to_string());
        let quantization = match self.container {
            Container::CompressedTensors => {
                let ignore: Vec<_> =
                    std::iter::once(self.config.head_module().to_owned()).chain(kept).collect();
                compressed_tensors::quantization_config(&self.groups(), &ignore, self.by_group())
                    .map_err(fault)?
            }
            Container::Gptq => {
                let damp = self.recipe.method.damping();
                let settings = gptq_files::Settings { desc_act: self.by_group(), damp };
                gptq_files::quantization_config(&self.groups(), &kept, settings).map_err(fault)?
            }
            Container::Awq => awq::quantization_config(&self.groups_of_one_size(), &kept).map_err(fault)?,
            Container::Modelopt => {
                modelopt::quantization_config(&self.groups(), &not_linear(&self.config, &kept))
                    .map_err(fault)?
            }
            Container::Bitsandbytes => {
                bitsandbytes::quantization_config(&self.groups(), &kept).map_err(fault)?
            }
            Container::DeepseekFp8 => fp8::quantization_config(&self.groups(), &kept).map_err(fault)?,
            Container::Mlx => mlx::quantization(&self.groups()).map_err(fault)?,
            Container::Exl2 => exl2::quantization_config(self.linear_bits_per_weight()),
            Container::Exl3 => exl3::quantization_config(self.trellis_bits(), &self.recipe.weights),
            // As in the published models.
            Container::Mxfp4 => serde_json::json!({
                "quant_method": gpt_oss::QUANT_METHOD,
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
            }),
            Container::Onnx => {
                let layers = self.quantized();
                let shaped =
                    layers.map(|(info, scheme)| (info.module.as_str(), (info.rows, info.cols), scheme));
                onnx::quantization_config(shaped)
            }
            Container::Native => {
                let input = |info: &LinearInfo| Some((info.module.clone(), self.recipe.activations.clone()?));
                let inputs: BTreeMap<_, _> = self.quantized().filter_map(|(info, _)| input(info)).collect();
                native::quantization_config(&inputs)
            }
            // One file, whose metadata are no config.json.
            Container::Gguf => Value::Null,
        };
        let mut quantization = self.with_rotations(quantization);
        if let Some(kv) = &self.recipe.kv {
            self.container.declare_kv(kv, &mut quantization);
        }
        if let Some(policy) = &self.recipe.kv_levels {
            native::declare_levels(&mut quantization, &policy.to_string());
        }
        if let Value::Object(fields) = &mut config {
            if self.untied().is_some() {
                fields.insert("tie_word_embeddings".to_owned(), Value::Bool(false));
            }
            match self.container {
                // Where its own loader looks; hubs look at the other.
                Container::Mlx => fields.insert("quantization".to_owned(), quantization.clone()),
                // What a source in MLX's convention says of itself.
                _ => fields.remove("quantization"),
            };
            fields.insert("quantization_config".to_owned(), quantization);
        }
        Ok(config)
    }

    /// A `quantization_config` that says which inputs are rotated.
    fn with_rotations(&self, mut quantization: Value) -> Value {
        let rotated = self.rotated_inputs();
        if rotated.is_empty() {
            return quantization;
        }
        let modules = rotated.iter().map(|(module, order)| (module.as_str(), *order));
        match self.container {
            Container::Native => native::rotate_inputs(&mut quantization, modules),
            Container::CompressedTensors => {
                let mut groups: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
                modules.for_each(|(module, order)| groups.entry(order).or_default().push(module));
                quantization["transform_config"] = compressed_tensors::rotated_inputs(groups);
            }
            _ => {}
        }
        quantization
    }

    /// Metadata of the weight files.
    pub(crate) fn metadata(&self) -> BTreeMap<String, String> {
        let mut metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        if self.container == Container::Native {
            metadata.extend(
                self.quantized().map(|(info, scheme)| native::metadata(&self.linear_plan(info, scheme))),
            );
        }
        metadata
    }

    /// The linear layers that stay as they are: those of no scheme, and the routers of experts, which servers would take
    /// for quantized.
    fn kept(&self) -> Vec<String> {
        let kept = self.linears.iter().filter(|l| l.scheme.is_none()).map(|l| l.info.module.clone());
        let sides = self.config.tensors().into_iter().filter(|t| matches!(t.role, Role::Side { .. }));
        kept.chain(sides.filter_map(|t| t.name.strip_suffix(".weight").map(str::to_owned))).collect()
    }

    /// The configuration that the container has beside `config.json`: its file's name and content.
    pub(crate) fn side_config(&self, config: &Value) -> Result<Option<(&'static str, Value)>> {
        match self.container {
            Container::Gptq => Ok(Some((gptq_files::FILE_NAME, config["quantization_config"].clone()))),
            Container::Exl3 => {
                let content = exl3::tensor_storage(&config["quantization_config"], &self.specs);
                Ok(Some((exl3::FILE_NAME, content)))
            }
            Container::Modelopt => {
                let kept = not_linear(&self.config, &self.kept());
                let content = modelopt::hf_quant_config(&self.groups(), &kept, self.recipe.kv.as_ref());
                let fault = |e: NotStorable| model_not_storable(self.container, e.to_string());
                Ok(Some((modelopt::FILE_NAME, content.map_err(fault)?)))
            }
            _ => Ok(None),
        }
    }

    /// Modules whose inputs are rotated as the model runs, and the orders of the matrices.
    fn rotated_inputs(&self) -> Vec<(String, usize)> {
        if let Some(conversion) = &self.conversion {
            return conversion.rotations.clone();
        }
        let rotated = self.rotation().map(|options| rotate::rotated_inputs(&self.config, options));
        rotated.into_iter().flatten().map(|(info, matrix)| (info.module, matrix.order())).collect()
    }

    /// Bits of a code of the quantized linear layers that are stored in a trellis, on average.
    fn trellis_bits(&self) -> f64 {
        let half_bits = |(info, scheme): (&LinearInfo, &Scheme)| {
            scheme.format.trellis().map_or(0, |trellis| trellis.half_bits() * info.rows * info.cols)
        };
        self.quantized().map(half_bits).sum::<usize>() as f64 / (2 * self.linear_weights().max(1)) as f64
    }

    /// Modules by scheme, in the order of first appearance.
    fn groups(&self) -> Vec<ModuleGroup> {
        self.groups_by(|_, scheme| scheme.clone())
    }

    /// The same for a container that has one group size for the model: a row that is as wide as the groups of other layers is a
    /// group like these.
    fn groups_of_one_size(&self) -> Vec<ModuleGroup> {
        let blocks = |scheme: &Scheme| scheme.format.blocks();
        let size = self.quantized().find_map(|(_, scheme)| match blocks(scheme) {
            Blocks::Group(size) => Some(size),
            _ => None,
        });
        self.groups_by(|info, scheme| {
            let mut scheme = scheme.clone();
            if let (Format::Affine(affine), Some(size)) = (&mut scheme.format, size)
                && affine.blocks == Blocks::Row
                && info.cols == size as usize
            {
                affine.blocks = Blocks::Group(size);
            }
            scheme
        })
    }

    fn groups_by(&self, named: impl Fn(&LinearInfo, &Scheme) -> Scheme) -> Vec<ModuleGroup> {
        let mut groups: Vec<ModuleGroup> = Vec::new();
        for (info, scheme) in self.quantized() {
            let scheme = named(info, scheme);
            match groups.iter_mut().find(|(known, ..)| *known == scheme) {
                Some((_, _, modules)) => modules.push(info.module.clone()),
                None => groups.push((scheme, self.recipe.activations.clone(), vec![info.module.clone()])),
            }
        }
        groups
    }
}

/// The modules `kept` as they are, and head and embedding, which are never quantized.
fn not_linear(config: &ModelConfig, kept: &[String]) -> Vec<String> {
    kept.iter().cloned().chain([config.head_module().to_owned(), config.embedding_module()]).collect()
}

//! Recipe files. Unknown keys are errors that name the nearest known key.

use std::sync::Arc;

use mantissa_methods::e2e::{self, EndToEnd};
use mantissa_methods::registry::{self, RegisteredTransform};
use mantissa_methods::{Method, Transform, rtn};
use mantissa_num::Scheme;
use mantissa_options::{self as options, Faults, TableSpec};
use mantissa_store::FileDigest;
use mantissa_store::convention::gguf;
use toml::Table;

use super::keys::FileKeys;
use super::kinds::Kv;
use super::reader::{Reader, fault};
use super::{LayerRule, Recipe, RecipeError, for_method, rules};
use crate::input_scales::Observer;

/// Parses a recipe file.
pub(super) fn parse(file: &str, text: &str) -> Result<Recipe, RecipeError> {
    let table: Table = text.parse().map_err(|e: toml::de::Error| {
        let message = e.message().replace('\n', " ");
        let line = e.span().map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count());
        fault(file, &format!("line {line}"), message, "TOML")
    })?;
    let reader = Reader { file, table: &table };
    let tables = registry::transform_tables().into_iter().chain(registry::tables());
    let tables: Vec<_> = tables.map(|spec| spec.name).chain([e2e::NAME]).collect();
    let mut faults = Faults::default();
    let keys: FileKeys = options::read_beside(&table, "", &tables, &mut faults);
    reader.refuse(faults)?;
    check(&reader, &keys)?;
    let weights = weights(&reader, &keys)?;
    // Some defaults of a method depend on the scheme.
    let mut method = (keys.method.new)(&weights);
    let weights = method.scheme(weights);
    let mut layers = Vec::new();
    // `keep` comes before `[[layers]]`, because the first rule that matches is used.
    if !keys.keep.is_empty() {
        layers.push(LayerRule { modules: keys.keep, ..LayerRule::default() });
    }
    layers.extend(rules::resolve(&reader, keys.layers, &*method)?);
    let transform = transform(&reader, keys.transform, &*method)?;
    // The methods of rules are new, so nothing else holds them.
    let rule_methods = layers.iter_mut().filter_map(|rule| Arc::get_mut(rule.own_method.as_mut()?));
    method_options(&reader, std::iter::once(&mut *method).chain(rule_methods).collect())?;
    rules::check(&reader, &layers, &*method, (transform.as_deref(), keys.file_type))?;
    let (kv, kv_levels) = match keys.kv {
        None => (None, None),
        Some(Kv::Scheme(scheme)) => (Some(scheme), None),
        Some(Kv::Levels(policy)) => (None, Some(*policy)),
    };
    Ok(Recipe {
        name: file.to_owned(),
        transform,
        method: method.into(),
        tuning: tuning(&reader, keys.tune.is_some())?,
        weights,
        activations: keys.activations,
        kv,
        kv_levels,
        file_type: keys.file_type,
        container: keys.format.or(keys.file_type.map(|_| gguf::CONTAINER)),
        layers,
        options: keys.options,
        sha256: FileDigest::of(text.as_bytes()).hex(),
    })
}

/// Checks keys that exclude or need each other.
fn check(reader: &Reader<'_>, keys: &FileKeys) -> Result<(), RecipeError> {
    if let Some(file_type) = keys.file_type.filter(|_| keys.method.name != rtn::NAME) {
        let got = format!("\"{}\"", file_type.name);
        return Err(reader.fault("file_type", got, "none without method \"rtn\""));
    }
    let options = keys.options;
    if options.percentile.is_some() && !matches!(options.observer, Observer::Percentile(_)) {
        let got = reader.table.get("percentile").map(ToString::to_string).unwrap_or_default();
        return Err(reader.fault("percentile", got, "none without observer = \"percentile\""));
    }
    Ok(())
}

/// Returns the scheme of weights, or that of llama.cpp's file type, from which `keep` and `layers` are exceptions.
fn weights(reader: &Reader<'_>, keys: &FileKeys) -> Result<Scheme, RecipeError> {
    match (&keys.weights, keys.file_type) {
        (Some(weights), None) => Ok(weights.clone()),
        (None, Some(ty)) => Ok(Scheme::codec(ty.base)),
        (None, None) => Err(reader.fault("weights", "nothing", "a scheme such as \"int4-g128\"")),
        (Some(_), Some(_)) => {
            let expected = "none beside file_type, which sets the type of every tensor";
            Err(reader.fault("weights", "a scheme", expected))
        }
    }
}

/// Makes the transform with the options of its table. Its defaults depend on the method.
fn transform(
    reader: &Reader<'_>,
    row: Option<RegisteredTransform>,
    method: &dyn Method,
) -> Result<Option<Arc<dyn Transform>>, RecipeError> {
    let mut named = row.map(|row| for_method((row.new)(), method));
    let own = named.as_ref().map_or(Vec::new(), |transform| transform.tables());
    let own = own.into_iter().map(options::spec).collect::<Vec<_>>();
    let with =
        named.as_ref().map_or("no transform".to_owned(), |named| format!("transform \"{}\"", named.name()));
    let other = |spec: &TableSpec| own.iter().all(|own| own.name != spec.name);
    for spec in registry::transform_tables().iter().filter(|spec| other(spec)) {
        if reader.table.contains_key(spec.name) {
            return Err(reader.fault(spec.name, "a table", format!("none with {with}")));
        }
    }
    if let Some(transform) = &mut named {
        for spec in &own {
            let Some(table) = reader.options(spec)? else { continue };
            reader.set(spec, table, transform.tables_mut())?;
        }
    }
    Ok(named.map(Arc::from))
}

/// Makes the training after the method, with the options of its table, if the recipe has one.
fn tuning(reader: &Reader<'_>, tunes: bool) -> Result<Option<EndToEnd>, RecipeError> {
    let mut tuning = EndToEnd::default();
    let spec = options::spec((e2e::NAME, &tuning));
    if let Some(table) = reader.options(&spec)? {
        if !tunes {
            return Err(reader.fault(e2e::NAME, "a table", "none without tune = \"e2e\""));
        }
        reader.set(&spec, table, vec![(e2e::NAME, &mut tuning)])?;
    }
    Ok(tunes.then_some(tuning))
}

/// Sets the options of the methods from their tables. Tables of other methods are errors.
fn method_options(
    reader: &Reader<'_>,
    mut methods: Vec<&mut (dyn Method + 'static)>,
) -> Result<(), RecipeError> {
    for spec in registry::tables() {
        let Some(table) = reader.options(&spec)? else { continue };
        let own = |method: &dyn Method| method.tables().iter().any(|(name, _)| *name == spec.name);
        if !methods.iter().any(|method| own(&**method)) {
            let mut names: Vec<_> = methods.iter().map(|method| format!("\"{}\"", method.name())).collect();
            names.dedup();
            let expected = format!("none with method {}", names.join(" and "));
            return Err(reader.fault(spec.name, "a table", expected));
        }
        methods.iter_mut().try_for_each(|method| reader.set(&spec, table, method.tables_mut()))?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mantissa_methods::registry::METHODS;
    use mantissa_store::convention::native;

    #[test]
    fn a_file_says_everything_a_name_can_and_more() {
        let text = r#"
            method = "rtn"
            weights = "int4-g32-asym"
            activations = "int8-token"
            format = "native"
            keep = ["model.layers.0.*"]
            [[layers]]
            modules = ["*.down_proj", "*.o_proj"]
            weights = "int8-channel"
            [[layers]]
            modules = ["*.k_proj"]
            weights = "keep"
        "#;
        let recipe = parse("r.toml", text).unwrap();
        let of = |m: &str| recipe.weights_of(m).map(ToString::to_string);
        assert_eq!(of("model.layers.0.mlp.down_proj"), None);
        assert_eq!(of("model.layers.1.mlp.down_proj").as_deref(), Some("int8-channel"));
        assert_eq!(of("model.layers.1.self_attn.k_proj"), None);
        assert_eq!(of("model.layers.1.self_attn.q_proj").as_deref(), Some("int4-g32-asym"));
        assert_eq!(recipe.container(), native::CONTAINER);
    }

    #[test]
    fn a_file_type_is_a_mixture_with_exceptions() {
        let text = "file_type = \"q4_k_m\"\nkeep = [\"*.k_proj\"]\n[[layers]]\nmodules = [\"*.o_proj\"]\nweights = \"q6_k\"";
        let recipe = parse("r.toml", text).unwrap();
        assert_eq!(recipe.file_type.map(|ty| ty.number), Some(15));
        assert_eq!((recipe.container(), recipe.weights.to_string().as_str()), (gguf::CONTAINER, "q4_k"));
        let of = |module: &str| recipe.rule_of(module).map(|r| r.weights.as_ref().map(ToString::to_string));
        assert_eq!(of("model.layers.0.self_attn.o_proj"), Some(Some("q6_k".to_owned())));
        assert_eq!(of("model.layers.0.self_attn.k_proj"), Some(None));
        assert_eq!(of("model.layers.0.self_attn.q_proj"), None);
    }

    /// Returns the options of the method in a recipe file.
    fn settings(text: &str) -> Vec<String> {
        let method = parse("r.toml", text).unwrap().method;
        method.settings().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn gptq_has_its_own_table() {
        let own = [
            "damp = 0.1",
            "block = 64",
            "act_order = false",
            "groups = \"original\"",
            "range = \"amax\"",
            "asymmetric = 0.5",
        ];
        let text = format!("method = \"gptq\"\nweights = \"int4-g32\"\n[gptq]\n{}", own.join("\n"));
        assert_eq!(settings(&text), own.map(|line| format!("gptq.{line}")));
        // GPTAQ is selected by its name, as in recipe names; its share can be changed.
        let text = "method = \"gptaq\"\nweights = \"int4-g32\"";
        let gptaq = parse("r.toml", text).unwrap().method;
        let named = crate::recipe::name::parse("gptaq-int4-g32").unwrap().method;
        assert_eq!((gptaq.recipe_name(), gptaq.settings()), (named.recipe_name(), named.settings()));
        assert_eq!((gptaq.name(), gptaq.recipe_name()), ("gptq", "gptaq"));
        let less = settings(&format!("{text}\n[gptq]\nasymmetric = 0.25\ndamp = 0.1"));
        assert!(
            less.contains(&"gptq.asymmetric = 0.25".to_owned())
                && less.contains(&"gptq.damp = 0.1".to_owned())
        );
        let wrong = parse("r.toml", "method = \"gtpaq\"\nweights = \"int4-g32\"").unwrap_err();
        assert!(wrong.to_string().contains("gptaq"), "{wrong}");
    }

    /// Every method reads back the options that it prints.
    #[test]
    fn options_print_and_parse() {
        for row in &METHODS {
            let scheme = if row.name == "qtip" { "trellis2" } else { "int4-g32" };
            let head = format!("method = \"{}\"\nweights = \"{scheme}\"", row.name);
            let plain = parse("r.toml", &head).unwrap().method;
            let mut text = head;
            for (name, options) in plain.tables() {
                let lines: Vec<_> =
                    options.values().iter().map(|(key, value)| format!("{key} = {value}")).collect();
                assert_eq!(lines.len(), options.keys().len(), "{}", row.name);
                text += &format!("\n[{name}]\n{}", lines.join("\n"));
            }
            let read = parse("r.toml", &text).unwrap().method;
            assert_eq!((read.recipe_name(), read.settings()), (row.name, plain.settings()));
        }
    }

    #[test]
    fn transforms_have_their_own_tables() {
        let transform = |text: &str| {
            let found = parse("r.toml", &format!("weights = \"int4-g32\"\n{text}")).unwrap().transform;
            found.map(|transform| {
                let settings = transform.settings().iter().map(ToString::to_string).collect::<Vec<_>>();
                (transform.name(), settings.join(" "))
            })
        };
        let smooth = |alpha: &str| Some(("smooth", format!("smooth.alpha = {alpha}")));
        assert_eq!(transform("transform = \"smooth\""), smooth("0.5"));
        assert_eq!(transform("transform = \"smooth\"\n[smooth]\nalpha = 0.75"), smooth("0.75"));
        assert_eq!(transform("transform = \"smooth\"\n[smooth]\nalpha = \"search\""), smooth("\"search\""));
        assert_eq!(transform("transform = \"awq\""), Some(("awq", String::new())));
        let text = "transform = \"rotate\"\n[rotate]\nresidual = false\nonline = false\nseed = 9";
        let rotate = "rotate.residual = false rotate.values = true rotate.online = false rotate.seed = 9";
        assert_eq!(transform(text), Some(("rotate", rotate.to_owned())));
        let text = "transform = \"spin\"\n[spin]\nonline = false\nseed = 9\nrate = 0.1\niterations = 7\ngradient = \"both\"";
        let spin = "spin.residual = true spin.values = true spin.online = false spin.seed = 9 spin.iterations = 7 spin.rate = 0.1 \
                    spin.batch_tokens = 2048 spin.gradient = \"both\"";
        assert_eq!(transform(text), Some(("spin", spin.to_owned())));
        assert_eq!(transform(""), None);
    }

    #[test]
    fn training_has_its_own_table() {
        let own = ["epochs = 3", "rate = 0.125", "batch_tokens = 64", "seed = 5", "with = \"tables\""];
        let text = format!("weights = \"int4-g32\"\ntune = \"e2e\"\n[e2e]\n{}", own.join("\n"));
        let tuning = parse("r.toml", &text).unwrap().tuning.unwrap();
        let settings = options::settings(&[(e2e::NAME, &tuning)]);
        let expected = own.map(|line| format!("e2e.{line}"));
        assert_eq!(settings.iter().map(ToString::to_string).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn autoround_has_its_own_table() {
        let own = [
            "iterations = 50",
            "rate = 0.01",
            "clip_rate = 0.002",
            "batch_tokens = 2048",
            "seed = 7",
            "metric = \"mse\"",
        ];
        let text = format!("method = \"autoround\"\nweights = \"int4-g32\"\n[autoround]\n{}", own.join("\n"));
        assert_eq!(settings(&text), own.map(|line| format!("autoround.{line}")));
    }

    /// Quoted text is limited to 200 characters.
    #[test]
    fn quoted_text_is_cut_and_escaped() {
        let long = "x".repeat(6000);
        for text in [
            format!("{long} = 1"),
            format!("method = \"{long}\""),
            format!("weights = \"{long}\""),
            format!("weights = \"int4\\u001b[31m{long}\""),
            format!("weights = \"nf4\"\nactivations = \"{long}\""),
            format!("weights = \"nf4\"\nformat = \"{long}\""),
            format!("weights = \"nf4\"\n[[layers]]\n{long} = 1"),
            format!("file_type = \"\\u001b[31m{long}\""),
            format!("\"\\u001b{long}\" = 1"),
        ] {
            let error = parse("r.toml", &text).unwrap_err().to_string();
            assert!(error.len() < 1500 && !error.contains('\n') && !error.contains('\u{1b}'), "{error}");
        }
    }

    #[test]
    fn faults_name_file_key_and_fix() {
        for (text, parts) in [
            ("weigths = \"nf4\"", ["weigths", "did you mean \"weights\"?"]),
            ("weights = 4", ["integer", "a string"]),
            ("weights = \"int4-gg\"", ["weights", "gg"]),
            ("weights = \"nf4\"\nmethod = \"gtpq\"", ["expected gptq, ", "got \"gtpq\""]),
            ("weights = \"nf4\"\nformat = \"nativ\"", ["expected native, ", "got \"nativ\""]),
            ("method = \"rtn\"", ["weights", "nothing"]),
            ("file_type = \"q4_k_n\"", ["q4_k_n", "expected q4_k_"]),
            ("file_type = \"q4_0\"\nweights = \"q4_0\"", ["weights", "none beside file_type"]),
            ("file_type = \"q4_0\"\nmethod = \"gptq\"", ["file_type", "method \"rtn\""]),
            ("weights = \"nf4\"\n[[layers]]\nweights = \"nf4\"", ["layers[0].modules", "nothing"]),
            (
                "weights = \"nf4\"\n[[layers]]\nmodule = [\"a\"]",
                ["layers[0].module", "did you mean \"modules\"?"],
            ),
            ("weights = \"nf4\"\nkeep = [1]", ["keep", "integer"]),
            ("weights = ", ["line 1", "TOML"]),
            ("weights = \"nf4\"\n[autoround]\nrate = 0.1", ["autoround", "none with method \"rtn\""]),
            (
                "method = \"autoround\"\nweights = \"nf4\"\n[autoround]\niterations = 0",
                ["autoround.iterations", "a whole number from 1 to 1000000"],
            ),
            (
                "method = \"autoround\"\nweights = \"nf4\"\n[autoround]\nrate = 2.0",
                ["autoround.rate", "a number from 0 to 0.5"],
            ),
            (
                "method = \"autoround\"\nweights = \"nf4\"\n[autoround]\niteration = 1",
                ["autoround.iteration", "\"iterations\"?"],
            ),
            ("weights = \"nf4\"\ntransform = \"magic\"", ["transform", "smooth, awq, rotate, spin"]),
            ("weights = \"nf4\"\nobserver = \"min\"", ["observer", "max, percentile, mse"]),
            ("weights = \"nf4\"\n[smooth]\nalpha = 0.5", ["smooth", "none with no transform"]),
            (
                "weights = \"nf4\"\ntransform = \"awq\"\n[rotate]\nseed = 1",
                ["rotate", "none with transform \"awq\""],
            ),
            (
                "weights = \"nf4\"\ntransform = \"spin\"\n[spin]\nrate = 2.0",
                ["spin.rate", "a number from 0 to 1"],
            ),
            ("weights = \"nf4\"\ntransform = \"smooth\"\n[smooth]\nalpha = 2.0", ["smooth.alpha", "search"]),
            (
                "weights = \"nf4\"\ntransform = \"rotate\"\n[rotate]\nonline = 1",
                ["rotate.online", "true or false"],
            ),
            (
                "method = \"autoround\"\nweights = \"nf4\"\n[autoround]\nmetric = \"kl\"",
                ["autoround.metric", "fisher, mse"],
            ),
            ("weights = \"nf4\"\n[gptq]\ndamp = 0.1", ["gptq", "none with method \"rtn\""]),
            ("weights = \"trellis2\"\n[qtip]\ndamp = 0.1", ["qtip", "none with method \"rtn\""]),
            ("method = \"qtip\"\nweights = \"trellis2\"\n[qtip]\ndamp = 2.0", ["qtip.damp", "0 to 1"]),
            ("method = \"qtip\"\nweights = \"trellis2\"\n[qtip]\nmetric = \"x\"", ["qtip.metric", "fisher"]),
            ("method = \"gptq\"\nweights = \"nf4\"\n[gptq]\ndamp = 2", ["gptq.damp", "0 to 1"]),
            (
                "method = \"gptq\"\nweights = \"nf4\"\n[gptq]\nblock = 0",
                ["gptq.block", "a whole number of columns, at least 1"],
            ),
            ("method = \"gptq\"\nweights = \"nf4\"\n[gptq]\ngroups = \"x\"", ["gptq.groups", "static"]),
            ("method = \"gptq\"\nweights = \"nf4\"\n[gptq]\ngroup = 1", ["gptq.group", "\"groups\"?"]),
            (
                "method = \"gptq\"\nweights = \"nf4\"\n[spqr]\noutliers = 0.1",
                ["spqr", "none with method \"gptq\""],
            ),
            ("method = \"spqr\"\nweights = \"nf4\"\n[spqr]\noutliers = 0.3", ["spqr.outliers", "to 0.2"]),
            ("method = \"spqr\"\nweights = \"nf4\"\n[spqr]\noutliers = 0.0", ["spqr.outliers", "above 0.0"]),
            (
                "method = \"spqr\"\nweights = \"nf4\"\n[spqr]\noutlier = 0.1",
                ["spqr.outlier", "\"outliers\"?"],
            ),
        ] {
            let message = parse("r.toml", text).unwrap_err().to_string();
            assert!(
                parts.iter().all(|p| message.contains(p)) && message.contains("r.toml"),
                "{text}: {message}"
            );
        }
    }
}

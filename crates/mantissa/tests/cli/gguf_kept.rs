//! What jobs on GGUF files keep: keys, tensors of no layer, tokenizers that cannot be read, codes of embedding and head.

use std::path::{Path, PathBuf};

use mantissa_store::Gguf;
use mantissa_store::gguf::{GgmlType, GgufTensorSpec, GgufWriter, Value};
use tempfile::TempDir;

use crate::main_job::tiny;
use crate::support::{json, mantissa, stderr, succeed, text};

/// Writes the demo as a GGUF file.
fn demo(dir: &Path) -> PathBuf {
    let out = dir.join("demo.gguf");
    succeed(&["quantize", "demo", "--recipe", "rtn-f16", "--out", text(&out), "--quiet"]);
    out
}

/// Copies a GGUF file with its metadata changed and one more tensor.
fn changed(source: &Path, out: &Path, change: impl FnOnce(&mut Vec<(String, Value)>)) {
    let file = Gguf::open(source).unwrap();
    let mut metadata: Vec<(String, Value)> =
        file.metadata().iter().map(|(key, value)| (key.to_owned(), value.clone())).collect();
    change(&mut metadata);
    let mut specs: Vec<GgufTensorSpec> = file
        .tensors()
        .iter()
        .map(|tensor| GgufTensorSpec::new(tensor.name.clone(), tensor.ty, tensor.shape.clone()))
        .collect();
    specs.push(GgufTensorSpec::new("extra.weight", GgmlType::F32, [2, 3]));
    let mut writer = GgufWriter::create(out, &metadata, &specs).unwrap();
    for tensor in file.tensors() {
        writer.write(&tensor.name, &file.read(tensor).unwrap()).unwrap();
    }
    writer.write("extra.weight", &[7; 24]).unwrap();
    writer.finish().unwrap();
}

fn set(metadata: &mut Vec<(String, Value)>, key: &str, value: Value) {
    metadata.retain(|(known, _)| known != key);
    metadata.push((key.to_owned(), value));
}

#[test]
fn keys_and_tensors_that_a_job_does_not_change_are_kept() {
    let temp = TempDir::new().unwrap();
    let (source, out) = (temp.path().join("source.gguf"), temp.path().join("out.gguf"));
    changed(&demo(temp.path()), &source, |metadata| {
        set(metadata, "vendor.note", Value::String("keep me".into()));
        set(metadata, "llama.vocabulary.made_by", Value::U64(7));
        set(metadata, "tokenizer.ggml.pre", Value::String("of-a-later-version".into()));
        set(metadata, "quantize.imatrix.file", Value::String("old".into()));
    });
    let output = mantissa(&["quantize", text(&source), "--recipe", "rtn-q8_0", "--out", text(&out)]);
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr(&output));
    assert!(output.status.success(), "{said}");
    let told: String = said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(told.contains("the tokenizer is kept as it is and not checked"), "{told}");
    let (before, after) = (Gguf::open(&source).unwrap(), Gguf::open(&out).unwrap());
    let decided = ["general.file_type", "general.alignment", "quantize.imatrix.file"];
    for (key, value) in before.metadata().iter().filter(|(key, _)| !decided.contains(key)) {
        assert_eq!(after.metadata().get(key), Some(value), "{key}");
    }
    assert_eq!(after.metadata().get("quantize.imatrix.file"), None, "it tells of other codes");
    let extra = after.get("extra.weight").unwrap();
    assert_eq!((extra.ty, &extra.shape[..]), (GgmlType::F32, &[2, 3][..]));
    assert_eq!(after.read(extra).unwrap(), [7; 24]);
    // It runs on token ids.
    let tokens = temp.path().join("tokens.json");
    std::fs::write(&tokens, "[[1, 2, 3, 4, 5]]").unwrap();
    assert!(json(&["eval", text(&out), "--tokens", text(&tokens), "--json"])["nll"].as_f64().unwrap() > 0.0);
}

/// A folder made of a GGUF file has its tokenizer and the codes of its embedding, and gives the same file again.
#[test]
fn a_folder_between_two_files_changes_nothing() {
    let temp = TempDir::new().unwrap();
    let [source, folder, back] = ["a.gguf", "folder", "b.gguf"].map(|name| temp.path().join(name));
    let embeddings = ["--embeddings", "q8_0", "--out", text(&source), "--quiet"];
    succeed(&[&["quantize", "demo", "--recipe", "rtn-q4_1"][..], &embeddings].concat());
    succeed(&["convert", text(&source), "--format", "native", "--out", text(&folder), "--quiet"]);
    succeed(&["convert", text(&folder), "--format", "gguf", "--out", text(&back), "--quiet"]);
    let (a, b) = (Gguf::open(&source).unwrap(), Gguf::open(&back).unwrap());
    assert_eq!(a.get("token_embd.weight").unwrap().ty, GgmlType::Q8_0);
    assert_eq!(a.tensors().len(), b.tensors().len());
    for tensor in a.tensors() {
        let other = b.get(&tensor.name).unwrap();
        assert_eq!((tensor.ty, &tensor.shape), (other.ty, &other.shape), "{}", tensor.name);
        assert_eq!(a.read(tensor).unwrap(), b.read(other).unwrap(), "{}", tensor.name);
    }
    let texts = [&source, &folder, &back].map(|model| {
        json(&["run", text(model), "-p", "Once upon a time", "-n", "24", "--json", "--quiet"])["text"].clone()
    });
    assert!(texts.iter().all(|found| *found == texts[0]), "{texts:?}");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        assert!(folder.join(file).is_file(), "{file}");
    }
}

#[test]
fn a_name_of_an_end_token_of_another_type_is_found() {
    let temp = TempDir::new().unwrap();
    let [plain, named] = ["plain.gguf", "named.gguf"].map(|name| temp.path().join(name));
    let made = temp.path().join("made.gguf");
    let source = tiny("llama2-gqa-tied");
    succeed(&["quantize", text(&source), "--recipe", "rtn-f16", "--out", text(&made), "--quiet"]);
    let name = |id: usize| {
        move |metadata: &mut Vec<(String, Value)>| {
            let (_, tokens) = metadata.iter_mut().find(|(key, _)| key == "tokenizer.ggml.tokens").unwrap();
            let Value::Array(_, tokens) = tokens else { panic!("no list") };
            tokens[id] = Value::String("<|im_end|>".into());
        }
    };
    changed(&made, &plain, |_| {});
    changed(&made, &named, name(100));
    let found = |file: &Path| {
        let output = mantissa(&["lint", text(file), "--for", "llama.cpp", "--json"]);
        String::from_utf8_lossy(&output.stdout).matches("\"gguf-ends\"").count()
    };
    assert_eq!((found(&plain), found(&named)), (0, 1));
}

/// Without a stated end llama.cpp takes token 2 or 11, whatever it is: what writes such a file says so, and so does the lint.
#[test]
fn a_model_without_an_end_token_is_told() {
    let temp = TempDir::new().unwrap();
    let [made, bare, folder, out] =
        ["made.gguf", "bare.gguf", "folder", "out.gguf"].map(|n| temp.path().join(n));
    let source = tiny("llama2-gqa-tied");
    succeed(&["quantize", text(&source), "--recipe", "rtn-f16", "--out", text(&made), "--quiet"]);
    changed(&made, &bare, |metadata| {
        metadata.retain(|(key, _)| key != "tokenizer.ggml.eos_token_id");
        for (key, value) in metadata {
            if let (Value::Array(_, values), true) = (value, key == "tokenizer.ggml.token_type") {
                values[2] = Value::I32(1);
            }
        }
    });
    let found = |file: &Path| {
        let output = mantissa(&["lint", text(file), "--for", "llama.cpp", "--json"]);
        String::from_utf8_lossy(&output.stdout).matches("\"gguf-default-end\"").count()
    };
    assert_eq!((found(&made), found(&bare)), (0, 1));
    std::fs::create_dir(&folder).unwrap();
    for entry in std::fs::read_dir(&source).unwrap() {
        let from = entry.unwrap().path();
        let name = from.file_name().unwrap().to_str().unwrap().to_owned();
        let bytes = std::fs::read(&from).unwrap();
        if name.ends_with(".json") {
            // No place states an end, and no name tells of one.
            let text = String::from_utf8(bytes).unwrap();
            let text = text.replace("\"eos_token", "\"other_token").replace("</s>", "<sss>");
            std::fs::write(folder.join(&name), text).unwrap();
        } else {
            std::fs::write(folder.join(&name), bytes).unwrap();
        }
    }
    let noted = |source: &Path| {
        let out = [text(&out), "--overwrite", "--json"];
        let report =
            succeed(&[&["quantize", text(source), "--recipe", "rtn-f16", "--out"][..], &out].concat());
        report.matches("the model states no end token: llama.cpp then ends at its default, token 11").count()
    };
    assert_eq!((noted(&source), noted(&folder)), (0, 1));
}

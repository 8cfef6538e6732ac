//! Entry functions that damage a valid input as the bytes say: raw bytes rarely pass the first checks of a header.

use std::fs;
use std::ops::ControlFlow;
use std::sync::LazyLock;

use mantissa_eval::{check_sequences, evaluate, token_windows};
use mantissa_model::{Batch, Buffers, Decoder, LinearInput, MapSource, ModelConfig};
use mantissa_num::round::random_u32;
use mantissa_quant::calibrate::Calibration;
use mantissa_store::convention::ModelFiles;
use mantissa_store::gguf::{GgmlType, Gguf, GgufTensorSpec, GgufWriter, Value};
use serde_json::json;

use super::{Folder, OnDisk, SMALL};

#[path = "../crates/mantissa/tests/corruptions/subjects.rs"]
mod subjects;

use subjects::Subject;

/// Whole model of some format, changed by the bytes: tensors get other shapes, dtypes, names and contents, config
/// fields other values. A model that opens and loads must run.
pub fn conventions(data: &[u8]) {
    static ALL: LazyLock<Vec<Subject>> = LazyLock::new(subjects::all);
    let Some((&which, changes)) = data.split_first() else { return };
    let mut subject = ALL[usize::from(which) % ALL.len()].clone();
    for change in changes.as_chunks::<6>().0.iter().take(8) {
        alter(&mut subject, *change);
    }
    let folder = Folder::empty();
    subject.write(&folder.0);
    let Ok(files) = ModelFiles::open(&folder.0) else { return };
    let _ = files.notes();
    let Ok(decoder) = Decoder::load(&files) else { return };
    let config = decoder.config();
    let Ok(mut buffers) = Buffers::plan(config, 3, 3) else { return };
    let mut logits = vec![0.0; config.vocab_size];
    let passed = decoder.forward(&Batch { tokens: &[0; 3], lens: &[3] }, &mut buffers);
    let _ = passed.and_then(|mut hidden| hidden.logits(2..3, &mut logits));
}

/// Makes one change of a model: its kind, tensor, position and values.
fn alter(subject: &mut Subject, [what, which, place, value, low, high]: [u8; 6]) {
    const DTYPES: [&str; 12] =
        ["F64", "F32", "F16", "BF16", "I64", "I32", "U32", "I16", "I8", "U8", "F8_E4M3", "F8_E8M0"];
    let victims = subject.victims();
    let Some(&i) = victims.get(usize::from(which) % victims.len().max(1)) else { return };
    let other = victims[usize::from(place) % victims.len()];
    let number = u64::from(value) << (low % 56);
    let tensor = &mut subject.tensors[i];
    match what % 9 {
        0 => drop(subject.tensors.remove(i)),
        1 if i != other => {
            let name = tensor.name.clone();
            subject.tensors[i].name = std::mem::replace(&mut subject.tensors[other].name, name);
        }
        2 => tensor.dtype = DTYPES[usize::from(value) % DTYPES.len()].to_owned(),
        3 if !tensor.shape.is_empty() => {
            let axis = usize::from(place) % tensor.shape.len();
            tensor.shape[axis] = number;
            // A correct length, to get past the header.
            let size = tensor.shape.iter().try_fold(4u64, |n, &d| n.checked_mul(d));
            if let Some(size) = size.filter(|size| *size < 1 << 20) {
                tensor.bytes.resize(size as usize, high);
            }
        }
        4 => tensor.shape.reverse(),
        5 => tensor.shape.insert(0, u64::from(value)),
        6 if !tensor.bytes.is_empty() => {
            let at = (usize::from(place) << 8 | usize::from(low)) % tensor.bytes.len();
            let end = tensor.bytes.len().min(at + 1 + usize::from(high % 8));
            tensor.bytes[at..end].fill(value);
        }
        7 => subject.cut = Some(usize::from(place) << 8 | usize::from(value)),
        _ => alter_field(&mut subject.config, place, value, number),
    }
}

/// Changes a field of the quantization config, or of the model config.
fn alter_field(config: &mut serde_json::Value, place: u8, kind: u8, number: u64) {
    let root = if config.get("quantization").is_some() { "quantization" } else { "quantization_config" };
    let inside = place & 1 == 0 && config.get(root).is_some();
    let mut at = if inside { &mut config[root] } else { config };
    let mut place = usize::from(place >> 1);
    while at.as_object().is_some_and(|fields| !fields.is_empty()) {
        let Some(fields) = at.as_object_mut() else { return };
        let n = fields.len();
        let Some((_, next)) = fields.iter_mut().nth(place % n) else { return };
        (at, place) = (next, place / n);
    }
    *at = match kind % 8 {
        0 => json!(null),
        1 => json!(number),
        2 => json!(-(number as f64)),
        3 => json!("x"),
        4 => json!([number]),
        5 => json!({"x": number}),
        6 => json!(true),
        _ => json!(kind),
    };
}

/// GGUF model in two files, with numbers, counts and names from the bytes.
pub fn split(data: &[u8]) {
    let Some((&[no, of, tensors, names], rest)) = data.split_first_chunk::<4>() else { return };
    let folder = Folder::empty();
    let (signed, without) = (rest.first().is_some_and(|b| b & 1 == 1), rest.get(1).map(|b| b % 7));
    let number = |n: u8| if signed { Value::I32(i32::from(n as i8)) } else { Value::U16(n.into()) };
    for (part, stated) in [(0u8, 0u8), (1, no)] {
        let mut metadata =
            vec![("split.no".to_owned(), number(stated)), ("split.count".to_owned(), number(of))];
        metadata.push(("split.tensors.count".to_owned(), number(tensors)));
        if without == Some(part) {
            metadata.clear();
        }
        let name = format!("t{}", if names & 1 == 1 { part } else { 0 });
        let cols = usize::from(names >> 1);
        let specs = [GgufTensorSpec::new(name.clone(), GgmlType::F32, [2, cols])];
        let path = folder.0.join(format!("m-{:05}-of-00002.gguf", part + 1));
        let Ok(mut writer) = GgufWriter::create(&path, &metadata, &specs) else { return };
        if writer.write(&name, &vec![0; 8 * cols]).is_err() || writer.finish().is_err() {
            return;
        }
        // The remaining bytes damage the second file.
        if let (1, Some(changes)) = (part, rest.get(2..)) {
            let mut bytes = fs::read(&path).expect("just written");
            for &[at, by] in changes.as_chunks::<2>().0 {
                let at = usize::from(at) % bytes.len();
                bytes[at] ^= by;
            }
            fs::write(&path, bytes).expect("a temporary file");
        }
    }
    let Ok(model) = Gguf::open_model(&folder.0.join("m-00001-of-00002.gguf")) else { return };
    for tensor in model.tensors().iter().filter(|tensor| tensor.len <= SMALL as u64) {
        let _ = model.read(tensor);
    }
}

/// Memory limit of a token file, in bytes.
const MEMORY: u64 = 64 << 20;

/// Fragments of a damaged token file.
const WORDS: [&str; 16] = [
    "[",
    "]",
    "[]",
    "[],",
    ",",
    "-",
    "1.5",
    "1e999",
    "null",
    "\"",
    "{",
    ":",
    "4294967296",
    "[[",
    "true",
    " ",
];

/// Lists of token windows of any lengths, as a file that may be damaged. Windows that the parser accepts must be
/// accepted by the calibration, the KV cache's levels and an evaluation too. The undamaged windows, including empty
/// ones, also go into the calibration directly.
pub fn windows(data: &[u8]) {
    let Some((&how, rest)) = data.split_first() else { return };
    let end = rest.iter().position(|byte| *byte == BREAK).unwrap_or(rest.len());
    let mut list: Vec<Vec<u32>> = Vec::new();
    for &byte in rest[..end].iter().take(96) {
        match (byte, list.last_mut()) {
            (BREAK.., _) => list.push(Vec::new()),
            (id, Some(window)) => window.push(id.into()),
            (id, None) => list.push(vec![id.into()]),
        }
    }
    calibrate(&list, how);
    let keyed = how & 1 == 1;
    let mut text = serde_json::to_string(&list).unwrap_or_default().into_bytes();
    for &[place, what, value] in rest.get(end + 1..).unwrap_or_default().as_chunks::<3>().0.iter().take(6) {
        let at = usize::from(place) * text.len() / 256;
        match what % 5 {
            0 => text.iter_mut().skip(at).take(1).for_each(|byte| *byte = value),
            1 => text.insert(at, value),
            2 => drop(text.drain(at..(at + usize::from(value % 9)).min(text.len()))),
            3 => drop(text.splice(at..at, WORDS[usize::from(value) % WORDS.len()].bytes())),
            _ => text.truncate(at),
        }
    }
    if keyed {
        text = [b"{\"v\": [], \"w\": ".as_slice(), &text, b"}"].concat();
    }
    let on_disk = OnDisk::new("windows", &text);
    let path = on_disk.0.display().to_string();
    let Ok(sequences) = token_windows(&if keyed { format!("{path}:w") } else { path }, MEMORY) else {
        return;
    };
    assert!(sequences.iter().all(|sequence| !sequence.tokens.is_empty()), "{sequences:?}");
    let list: Vec<Vec<u32>> = sequences.iter().map(|sequence| sequence.tokens.clone()).collect();
    let (_, config, decoder) = &*WINDOWED;
    let fit = check_sequences(config, &sequences).is_ok();
    assert_eq!(calibrate(&list, how), fit, "{list:?}");
    if fit {
        let _ = evaluate(decoder, None, &sequences, 1 + usize::from(how >> 1 & 1), &|_| {});
        let policy = "nuq4-1%".parse().expect("a policy");
        decoder.clone().set_kv_calibrated(&policy, &list).expect("levels of tokens that the model knows");
    }
}

/// Starts a window and, after all windows, the changes of the text; ids from 200 on are outside the vocabulary.
const BREAK: u8 = 240;

/// A model of two layers and 200 tokens.
static WINDOWED: LazyLock<(MapSource, ModelConfig, Decoder)> = LazyLock::new(|| {
    let config = json!({
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 200, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    });
    let parsed = ModelConfig::from_json(&config, "config.json").expect("a config");
    let value = |i: usize| random_u32(5, i as u64) as f32 / u32::MAX as f32 - 0.5;
    let tensor = |tensor: mantissa_model::TensorInfo| {
        let n: usize = tensor.shape.iter().product();
        (tensor.name, (tensor.shape, (0..n).map(value).collect()))
    };
    let tensors = parsed.tensors().into_iter().map(tensor).collect();
    let source = MapSource { config, tensors, ..MapSource::default() };
    let decoder = Decoder::load(&source).expect("a whole model");
    (source, parsed, decoder)
});

/// Runs windows through all layers, one input after another as methods do; false if they are refused.
fn calibrate(list: &[Vec<u32>], how: u8) -> bool {
    let (source, config, _) = &*WINDOWED;
    let threads = 1 + usize::from(how >> 2 & 3);
    let Ok(begun) = Calibration::begin(source, config, list, threads) else { return false };
    let mut begun = if how >> 4 & 1 == 1 { begun.keeping() } else { begun }.to_the_end();
    let go_on = &mut || ControlFlow::Continue(());
    while let Some(layer) = begun.next_layer().expect("the model is whole") {
        for input in [LinearInput::Qkv, LinearInput::O, LinearInput::GateUp, LinearInput::Down] {
            begun.statistics(&layer, &[input], go_on).expect("tokens that the model knows");
        }
        begun.advance(&layer, go_on).expect("tokens that the model knows");
    }
    let tokens: usize = list.iter().map(Vec::len).sum();
    assert_eq!(begun.into_states().total(), tokens * config.hidden_size);
    true
}

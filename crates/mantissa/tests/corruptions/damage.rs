//! Corruptions of a model.

use serde_json::{Value, json};

use crate::Expect;
use crate::subjects::{Subject, Tensor};

pub struct Case {
    pub what: String,
    pub subject: Subject,
    pub expect: Expect,
    /// The error must contain one of these.
    pub mentions: Vec<String>,
}

/// Returns all corruptions of a model.
pub fn of(subject: &Subject) -> Vec<Case> {
    let mut all = Cases { subject, cases: Vec::new() };
    for i in subject.victims() {
        all.shapes(i);
        all.dtypes(i);
        all.values(i);
    }
    all.names();
    all.file();
    all.fields();
    all.config();
    all.cases
}

struct Cases<'a> {
    subject: &'a Subject,
    cases: Vec<Case>,
}

impl Cases<'_> {
    fn push(
        &mut self,
        what: impl Into<String>,
        expect: Expect,
        mentions: &[&str],
        change: impl FnOnce(&mut Subject),
    ) {
        let mut subject = self.subject.clone();
        change(&mut subject);
        let mentions = mentions.iter().map(|&m| m.to_owned()).collect();
        self.cases.push(Case { what: what.into(), subject, expect, mentions });
    }

    /// Changes one of the victim's tensors.
    fn tensor(&mut self, i: usize, what: &str, expect: Expect, change: impl FnOnce(&mut Tensor)) {
        let tensor = &self.subject.tensors[i];
        let unread = self.subject.unread.iter().any(|suffix| tensor.name.ends_with(suffix));
        let expect = if unread && expect == Expect::Error { Expect::Either } else { expect };
        let module = self.subject.victim.trim_end_matches('.').to_owned();
        self.push(format!("{}: {what}", tensor.name), expect, &[&module], |s| change(&mut s.tensors[i]));
    }

    fn shapes(&mut self, i: usize) {
        let tensor = self.subject.tensors[i].clone();
        let (shape, one) = (tensor.shape.clone(), tensor.shape.iter().product::<u64>() == 1);
        // A single value may have any number of axes.
        let text = tensor.name.contains(".quant_state.");
        let rank = if one || text { Expect::Either } else { Expect::Error };
        self.tensor(i, "one axis more", rank, |t| t.shape.insert(0, 1));
        self.tensor(i, "no elements", Expect::Error, |t| {
            t.shape = [&[0], &t.shape[t.shape.len().min(1)..]].concat();
            t.bytes.clear();
        });
        self.tensor(i, "a huge axis", Expect::Error, |t| t.shape = vec![1 << 40, 1 << 20]);
        self.tensor(i, "a product that overflows", Expect::Error, |t| t.shape = vec![1 << 63, 2, 1 << 62]);
        if let Some((&first, rest)) = shape.split_first() {
            let row = tensor.bytes.len() / first.max(1) as usize;
            self.tensor(i, "a row more", Expect::Error, |t| {
                t.shape[0] += 1;
                t.bytes.extend_from_within(..row);
            });
            if first > 1 {
                // Zero points have two packings, in words and as a stream, one of them shorter.
                let packed = tensor.name.ends_with("weight_zero_point");
                let expect = if packed { Expect::Either } else { Expect::Error };
                self.tensor(i, "a row less", expect, |t| {
                    t.shape[0] -= 1;
                    t.bytes.truncate(t.bytes.len() - row);
                });
            }
            if rest.iter().any(|&n| n > 1) {
                self.tensor(i, "one axis for all", Expect::Error, |t| {
                    t.shape = vec![t.shape.iter().product()];
                });
            }
        }
        if let &[a, b] = shape.as_slice()
            && a != b
        {
            // Lists `[n, 1]` are sometimes written `[1, n]`.
            let expect = if a == 1 || b == 1 { Expect::Either } else { Expect::Error };
            self.tensor(i, "transposed", expect, |t| t.shape.swap(0, 1));
        }
    }

    fn dtypes(&mut self, i: usize) {
        let tensor = &self.subject.tensors[i];
        let twin = match tensor.dtype.as_str() {
            "F32" | "U32" => "I32",
            "I32" => "F32",
            "F16" => "I16",
            "BF16" | "I16" => "F16",
            "U8" => "BOOL",
            "I8" => "F8_E5M2",
            "F8_E4M3" | "F8_E8M0" => "I8",
            "I64" => "F64",
            _ => "U8",
        };
        self.tensor(i, &format!("as {twin}"), Expect::Error, |t| t.dtype = twin.to_owned());
        let n = tensor.shape.iter().product::<u64>() as usize;
        for (wide, bytes) in [("F64", 8), ("C64", 8), ("nonsense", 4)] {
            if wide == "F64" && n == 1 {
                continue;
            }
            self.tensor(i, &format!("as {wide}"), Expect::Error, |t| {
                t.dtype = wide.to_owned();
                t.bytes = vec![1; n * bytes];
            });
        }
    }

    /// Returns values for floats, and for integers that are indices.
    fn values(&mut self, i: usize) {
        let tensor = self.subject.tensors[i].clone();
        let index = ["g_idx", "q_invperm", "weight_shape"].iter().any(|suffix| tensor.name.ends_with(suffix));
        let scale_bytes = tensor.dtype == "U8" && tensor.name.ends_with("scales");
        // Offsets of 3e38 are finite, but their sums overflow.
        let offsets = ["biases", "nested_offset"].iter().any(|suffix| tensor.name.ends_with(suffix));
        let greatest = if offsets { Expect::NotNumbers } else { Expect::Either };
        let specials: &[(&str, &[u8], Expect)] = match tensor.dtype.as_str() {
            "F32" => &[
                ("NaN", &0x7fc0_0000_u32.to_le_bytes(), Expect::Error),
                ("infinity", &f32::INFINITY.to_le_bytes(), Expect::Error),
                ("-infinity", &f32::NEG_INFINITY.to_le_bytes(), Expect::Error),
                ("greatest", &f32::MAX.to_le_bytes(), greatest),
                ("-1", &(-1f32).to_le_bytes(), Expect::Either),
                ("0", &0f32.to_le_bytes(), Expect::Either),
                ("subnormal", &1u32.to_le_bytes(), Expect::Either),
            ],
            "F16" => &[
                ("NaN", &0x7e00_u16.to_le_bytes(), Expect::Error),
                ("infinity", &0x7c00_u16.to_le_bytes(), Expect::Error),
                ("-infinity", &0xfc00_u16.to_le_bytes(), Expect::Error),
                ("greatest", &0x7bff_u16.to_le_bytes(), Expect::Either),
                ("-1", &0xbc00_u16.to_le_bytes(), Expect::Either),
                ("0", &0_u16.to_le_bytes(), Expect::Either),
                ("subnormal", &1_u16.to_le_bytes(), Expect::Either),
            ],
            "F8_E4M3" => &[
                ("NaN", &[0x7f], Expect::Error),
                ("-NaN", &[0xff], Expect::Error),
                ("0", &[0], Expect::Either),
            ],
            _ if scale_bytes && self.subject.name.contains("mx") => {
                &[("NaN", &[0xff], Expect::Error), ("least", &[0], Expect::Either)]
            }
            "I32" if index => &[
                // compressed-tensors treats a list with a -1 as never filled.
                ("-1", &(-1i32).to_le_bytes(), Expect::Either),
                ("-2", &(-2i32).to_le_bytes(), Expect::Error),
                ("greatest", &i32::MAX.to_le_bytes(), Expect::Error),
                ("10^6", &1_000_000i32.to_le_bytes(), Expect::Error),
            ],
            "I64" if index => &[
                ("-1", &(-1i64).to_le_bytes(), Expect::Either),
                ("2^62", &(1i64 << 62).to_le_bytes(), Expect::Either),
            ],
            _ => &[
                ("ones", &[0xff], Expect::Either),
                ("zeros", &[0], Expect::Either),
                ("0x5a", &[0x5a], Expect::Either),
            ],
        };
        for (what, value, expect) in specials {
            self.tensor(i, &format!("{what} first"), *expect, |t| {
                let n = value.len().min(t.bytes.len());
                t.bytes[..n].copy_from_slice(&value[..n]);
            });
            self.tensor(i, &format!("{what} everywhere"), *expect, |t| {
                let n = t.bytes.len();
                t.bytes = value.iter().copied().cycle().take(n).collect();
            });
        }
        if tensor.name.ends_with("q_invperm") {
            self.tensor(i, "one place for all", Expect::Error, |t| t.bytes.fill(0));
        }
    }

    /// Missing, swapped and renamed tensors.
    fn names(&mut self) {
        let victims = self.subject.victims();
        let module = self.subject.victim.trim_end_matches('.').to_owned();
        for &i in &victims {
            let name = self.subject.tensors[i].name.clone();
            // If some valid files lack a tensor, an absent `g_idx` reveals nothing.
            let optional = [
                "g_idx",
                "input_scale",
                "pre_quant_scale",
                "weight_format",
                "mcg",
                "weight_shape",
                "q_invperm",
            ];
            let expect = match optional.iter().any(|suffix| name.ends_with(suffix)) {
                true => Expect::Either,
                false => Expect::Error,
            };
            self.push(format!("{name}: missing"), expect, &[&module], |s| drop(s.tensors.remove(i)));
        }
        for pair in victims.windows(2) {
            let (a, b) = (pair[0], pair[1]);
            let [first, second] = [&self.subject.tensors[a], &self.subject.tensors[b]];
            let alike = first.dtype == second.dtype && first.shape == second.shape;
            let expect = if alike { Expect::Either } else { Expect::Error };
            let what = format!("{} and {} swapped", first.name, second.name);
            self.push(what, expect, &[&module], |s| {
                let name = s.tensors[a].name.clone();
                s.tensors[a].name = std::mem::replace(&mut s.tensors[b].name, name);
            });
        }
        self.push("the layer under another name", Expect::Error, &[&module], |s| {
            for i in victims {
                s.tensors[i].name = s.tensors[i].name.replace("mlp", "mlps");
            }
        });
    }

    fn file(&mut self) {
        let size: usize = self.subject.tensors.iter().map(|t| t.bytes.len()).sum();
        for cut in [0, 7, 100, size / 2, size - 1] {
            let what = format!("file of {cut} bytes");
            self.push(what, Expect::Error, &["model.safetensors"], |s| s.cut = Some(cut));
        }
        if !self.subject.metadata.is_empty() {
            let module = self.subject.victim.trim_end_matches('.').to_owned();
            self.push("no metadata", Expect::Error, &[&module], |s| s.metadata.clear());
            for text in [
                "",
                "int4-g32",
                "nonsense [32, 96]",
                "int4-g0 [32, 96]",
                "int3-g32-asym [96, 32]",
                "mxfp4 [32, 96]",
            ] {
                self.push(format!("metadata {text:?}"), Expect::Error, &[&module], |s| {
                    s.metadata.values_mut().for_each(|value| *value = text.to_owned());
                });
            }
        }
    }

    /// Every field of the quantization config, with invalid values.
    fn fields(&mut self) {
        let mut paths = Vec::new();
        for root in ["quantization_config", "quantization"] {
            if let Some(value) = self.subject.config.get(root) {
                leaves(&format!("/{root}"), value, &mut paths);
            }
        }
        let odd = [
            json!(null),
            json!("x"),
            json!(-7),
            json!(0),
            json!(1u64 << 40),
            json!(3.5),
            json!(1e300),
            json!([]),
            json!({"x": 1}),
            json!(true),
        ];
        for path in paths {
            let key = path.rsplit('/').next().unwrap_or_default().to_owned();
            let was = self.subject.config.pointer(&path).cloned().unwrap_or_default();
            for value in odd.iter().filter(|value| **value != was) {
                let expect = if must_refuse(self.subject.name, &key, &was, value) {
                    Expect::Error
                } else {
                    Expect::Either
                };
                let what = format!("{path} = {value}");
                let module = self.subject.victim.trim_end_matches('.').to_owned();
                // A transform applies to other layers too.
                let mentions = ["config.json", "model.safetensors", &key, &module, "self_attn.q_proj"];
                self.push(what, expect, &mentions, |s| {
                    *s.config.pointer_mut(&path).unwrap() = value.clone();
                });
            }
        }
    }

    /// The whole quantization config, and sizes of the model.
    fn config(&mut self) {
        let module = self.subject.victim.trim_end_matches('.').to_owned();
        let root = if self.subject.config.get("quantization").is_some() {
            "quantization"
        } else {
            "quantization_config"
        };
        for value in [json!(null), json!([]), json!("int4"), json!(7), json!({})] {
            let what = format!("{root} = {value}");
            self.push(what, Expect::Error, &["config.json", &module], |s| s.config[root] = value);
        }
        if self.subject.config[root].get("quant_method").is_some() {
            for value in [json!("nonsense"), json!(""), json!(null), json!(4), json!([])] {
                let what = format!("quant_method = {value}");
                self.push(what, Expect::Error, &["config.json", &module], |s| {
                    s.config[root]["quant_method"] = value;
                });
            }
        }
        for (key, value) in [
            ("intermediate_size", json!(64 * 1024)),
            ("intermediate_size", json!(1u64 << 40)),
            ("hidden_size", json!(1u64 << 40)),
            ("num_hidden_layers", json!(1u64 << 31)),
            ("num_hidden_layers", json!(2)),
            ("vocab_size", json!(17)),
        ] {
            let mentions = ["config.json", "model.", "lm_head", key];
            self.push(format!("{key} = {value}"), Expect::Error, &mentions, |s| {
                s.config[key] = value.clone();
            });
        }
    }
}

/// Returns the paths of all fields below `value` that are not objects.
fn leaves(path: &str, value: &Value, paths: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                leaves(&format!("{path}/{}", key.replace('~', "~0").replace('/', "~1")), value, paths);
            }
        }
        _ => paths.push(path.to_owned()),
    }
}

/// True if a field describes the tensor layout and the value is inconsistent with it.
fn must_refuse(subject: &str, key: &str, was: &Value, value: &Value) -> bool {
    // EXL2 and EXL3 record everything in their tensors; their `bits` are an average.
    if subject.starts_with("exl") || !was.is_number() || value.is_null() {
        return false;
    }
    match key {
        "bits" | "num_bits" => true,
        "group_size" => value != &json!(0) || subject.starts_with("gptq"),
        _ => false,
    }
}

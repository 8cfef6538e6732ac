//! A model of one linear layer that the format tests write, read and damage.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};

use mantissa_num::{Given, Quantized, Scheme, quantize};
use mantissa_store::convention::{LinearWeight, ModelFiles, Weight};
use mantissa_store::{Error, ErrorClass, SafetensorsWriter, TensorSpec};
use serde_json::{Value, json};

pub const MODULE: &str = "model.layers.0.mlp.up_proj";
/// Not square, and the numbers of groups differ from the number of rows.
pub const ROWS: usize = 32;
pub const COLS: usize = 96;

pub type Tensor = (TensorSpec, Vec<u8>);

/// The model in memory.
#[derive(Clone)]
pub struct Model {
    pub config: Value,
    pub tensors: Vec<Tensor>,
}

impl Model {
    pub fn write(&self, dir: &Path) {
        let config = json!({"quantization_config": self.config});
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        let specs = self.tensors.iter().map(|(spec, _)| spec.clone()).collect();
        let path = dir.join("model.safetensors");
        let mut writer = SafetensorsWriter::create(&path, specs, Default::default()).unwrap();
        self.tensors.iter().for_each(|(spec, bytes)| writer.write(&spec.name, bytes).unwrap());
        writer.finish().unwrap();
    }

    pub fn read(&self) -> Result<LinearWeight, Error> {
        Ok(self.read_with_notes()?.0)
    }

    pub fn read_with_notes(&self) -> Result<(LinearWeight, Vec<String>), Error> {
        let dir = tempfile::tempdir().unwrap();
        self.write(dir.path());
        let files = ModelFiles::open(dir.path())?;
        Ok((files.linear(MODULE, ROWS, COLS, false)?, files.notes()))
    }

    pub fn suffixes(&self) -> Vec<String> {
        let suffix = |(spec, _): &Tensor| spec.name.strip_prefix(MODULE).map(|rest| rest[1..].to_owned());
        self.tensors.iter().filter_map(suffix).collect()
    }

    pub fn tensor(&mut self, suffix: &str) -> &mut Tensor {
        let name = format!("{MODULE}.{suffix}");
        self.tensors.iter_mut().find(|(spec, _)| spec.name == name).expect(suffix)
    }
}

pub fn weight(scheme: &Scheme) -> Quantized {
    let w: Vec<f32> = (0..ROWS * COLS).map(|i| ((i * i % 997) as f32 * 0.37).sin() * 0.1).collect();
    quantize(scheme, &w, ROWS, COLS, Given::default()).unwrap()
}

pub fn quantized(linear: &LinearWeight) -> &Quantized {
    let Weight::Quantized(q) = &linear.weight else { panic!("a dense weight") };
    q
}

/// Weight that the layer multiplies with.
pub fn values(linear: &LinearWeight) -> Vec<f32> {
    let mut w = quantized(linear).dequantize().unwrap();
    linear.transforms.check(linear.rows, linear.cols).unwrap();
    linear.transforms.fold(&mut w, linear.rows, linear.cols);
    w
}

/// Damages the weight file of the model in `dir` in `count` different ways. Each result must be refused as an input,
/// or pass `check`. Every test needs its own `seed`.
pub fn survive_damage(dir: &Path, seed: u64, count: u64, check: impl Fn(&LinearWeight)) {
    let copy = tempfile::tempdir().unwrap();
    std::fs::copy(dir.join("config.json"), copy.path().join("config.json")).unwrap();
    let good = std::fs::read(dir.join("model.safetensors")).unwrap();
    for n in 0..count {
        let random = |i: u64| mantissa_num::round::random_u32(n + 1000 * seed, i) as usize;
        let mut bytes = good.clone();
        match n % 4 {
            0 => bytes.truncate(random(0) % good.len()),
            // The header, where every byte counts.
            1 => bytes[random(1) % 700] = random(2) as u8,
            _ => (0..1 + random(3) % 8).for_each(|i| {
                let at = random(4 + 2 * i as u64) % good.len();
                bytes[at] ^= random(5 + 2 * i as u64) as u8;
            }),
        }
        std::fs::write(copy.path().join("model.safetensors"), &bytes).unwrap();
        let read = ModelFiles::open(copy.path()).and_then(|files| files.linear(MODULE, ROWS, COLS, false));
        match read {
            Err(error) => assert_eq!(error.class(), ErrorClass::Input, "{}: {error}", dir.display()),
            Ok(linear) => check(&linear),
        }
    }
}

/// Checkpoints of the public packages, if the data exists beside the repository.
pub fn artifacts() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/artifacts");
    if !path.is_dir() {
        eprintln!("skipped: no ../shared/artifacts");
        return None;
    }
    Some(path)
}

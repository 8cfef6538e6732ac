//! Calibration options: `--calibration` and `--calibration-tokens`.

use mantissa_jobs::calibration::{Calibration, WeightedText};
use mantissa_store::Paths;

/// Calibration options of a command.
#[derive(Clone, clap::Args)]
pub struct CalibrationArgs {
    /// Calibration text (repeatable)
    ///
    /// UTF-8. The text is cut into windows, of which --samples are taken evenly. In a .jsonl file each line is
    /// one sample: {"text": …}, or {"messages": […]}, rendered with the model's chat template. Several texts,
    /// each given as TEXT:WEIGHT, share the samples by weight [default: 1]. `default` is the built-in text:
    /// prose, code, dialogue and twelve languages, 200 kB, in samples of 512 tokens.
    #[arg(long, value_name = "TEXT", value_parser = WeightedText::parse, conflicts_with = "calibration_tokens", help_heading = "Calibration")]
    calibration: Vec<WeightedText>,
    /// Calibration token windows instead of text
    ///
    /// FILE.json is a list of lists of token ids, or with FILE.json:KEY an object of such lists. The windows are
    /// used as they are.
    #[arg(long, value_name = "FILE", help_heading = "Calibration", hide_short_help = true)]
    calibration_tokens: Option<String>,
    /// Number of calibration samples [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Calibration")]
    samples: Option<u32>,
    /// Maximum sample length in tokens [default: 2048]
    ///
    /// BOS included. The default is the model's context if that is less.
    #[arg(long, value_name = "N", help_heading = "Calibration")]
    length: Option<usize>,
    /// Number of samples that the unquantized model generates
    ///
    /// They are added to the calibration. Each continues a few tokens of a calibration sample, sampled at
    /// temperature 1 with --seed. Learned rounding and GPTAQ overfit a small calibration set; such samples extend
    /// it without more text.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=100_000), help_heading = "Calibration", hide_short_help = true)]
    generated_samples: u32,
}

impl CalibrationArgs {
    /// Returns the options as a job has them.
    pub fn value(&self) -> Calibration {
        Calibration {
            texts: self.calibration.clone(),
            tokens: self.calibration_tokens.clone(),
            samples: self.samples,
            length: self.length,
            generated: self.generated_samples,
        }
    }

    /// Adds the calibration files to the inputs of a command.
    pub fn paths(&self, paths: &mut Paths) {
        self.value().inputs().into_iter().for_each(|path| paths.read(path));
    }
}

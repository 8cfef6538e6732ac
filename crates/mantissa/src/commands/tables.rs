//! Options that quantize embedding and output head, and their sizes before and after.

use std::io::{self, Write};

use mantissa_jobs::tables::{Tables, short_or_scheme};
use mantissa_quant::TableSize;

use crate::output::{bytes, labelled};

/// Options that quantize embedding and head. Flattened into a command.
#[derive(clap::Args)]
pub struct TableArgs {
    /// Quantize the output head by RTN, such as int8
    ///
    /// int8, int4, fp8 or a scheme such as int8-channel, q6_k. Only its weights are quantized. A head that is tied to the embedding needs --untie, or --embeddings in
    /// formats whose readers take a quantized embedding (mlx, native, gguf).
    #[arg(long, value_name = "SCHEME", value_parser = short_or_scheme, help_heading = "Recipe")]
    head: Option<String>,
    /// Quantize the token embedding (and a tied head) by RTN
    #[arg(long, value_name = "SCHEME", value_parser = short_or_scheme, help_heading = "Recipe")]
    embeddings: Option<String>,
    /// Store a tied head as a tensor of its own
    #[arg(long, help_heading = "Recipe")]
    untie: bool,
}

impl TableArgs {
    /// Returns the options as a job has them.
    pub fn value(&self) -> Tables {
        Tables { head: self.head.clone(), embeddings: self.embeddings.clone(), untie: self.untie }
    }
}

/// Prints the sizes of quantized embedding and head.
///
/// # Errors
/// As `out`.
pub fn human(out: &mut dyn Write, sizes: &[TableSize]) -> io::Result<()> {
    for size in sizes {
        let bits = |n: u64| 8.0 * n as f64 / size.weights.max(1) as f64;
        let before = match size.before {
            0 => "tied to the embedding before".to_owned(),
            n => format!("{} at {:.2} bits before", bytes(n), bits(n)),
        };
        let TableSize { module, scheme, after, .. } = size;
        let after = format!("{} at {:.2} bits per weight", bytes(*after), bits(*after));
        labelled(out, "table", &format!("{module}: {scheme}, {after}; {before}"))?;
    }
    Ok(())
}

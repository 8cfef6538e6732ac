//! Measures the evaluation pass of a model on one thread: `forward_bench MODEL [WINDOWS [LENGTH]]`.
//!
//! Prints tokens per second (medians of several runs), with and without the head's logits, the share of f32
//! products in it and the rate of one large product on this machine for comparison.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use mantissa_kernels::{MatMut, MatRef, kernels};
use mantissa_model::{Batch, Buffers, Decoder};
use mantissa_store::convention::ModelFiles;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let path = args.first().ok_or("which model?")?;
    let number = |i: usize, default: usize| args.get(i).map_or(Ok(default), |text| text.parse());
    let decoder = Decoder::load(&ModelFiles::open(Path::new(path))?)?;
    let config = decoder.config();
    let (windows, length) = (number(1, 4)?, number(2, config.max_position_embeddings.min(512))?);

    let tokens: Vec<u32> = (0..windows * length).map(|i| (i * 7919 % config.vocab_size) as u32).collect();
    let lens = vec![length; windows];
    let mut buffers = Buffers::plan(config, tokens.len(), length)?;
    let mut logits = vec![0.0; length * config.vocab_size];
    let (mut states_only, mut with_logits) = (Vec::new(), Vec::new());
    for _ in 0..9 {
        let start = Instant::now();
        let mut hidden = decoder.forward(&Batch { tokens: &tokens, lens: &lens }, &mut buffers)?;
        states_only.push(start.elapsed().as_secs_f64());
        for first in (0..tokens.len()).step_by(length) {
            hidden.logits(first..first + length, &mut logits)?;
        }
        with_logits.push(start.elapsed().as_secs_f64());
    }

    let linear: usize = config.linears().iter().map(|l| l.rows * l.cols).sum();
    let attention = config.num_hidden_layers * config.query_width() * length; // half of all pairs, two products
    let head = config.vocab_size * config.hidden_size;
    let peak = product_rate();
    println!("one product of 512 x 2048 x 2048: {:.1} GFLOP/s", peak / 1e9);
    for (what, times, work) in [
        ("states", &mut states_only, linear + attention),
        ("states and logits", &mut with_logits, linear + attention + head),
    ] {
        let rate = tokens.len() as f64 / median(times);
        let flops = rate * 2.0 * work as f64;
        println!(
            "{what}: {rate:.0} tokens/s, {:.1} GFLOP/s, {:.0} % of that product's rate",
            flops / 1e9,
            100.0 * flops / peak
        );
    }
    Ok(())
}

/// Floating-point operations per second of a large product.
fn product_rate() -> f64 {
    let (t, n, k) = (512, 2048, 2048);
    let (a, b, mut c) = (vec![1.0; t * k], vec![1.0; n * k], vec![0.0; t * n]);
    let mut times = Vec::new();
    for _ in 0..9 {
        let start = Instant::now();
        kernels().gemm_nt(MatRef::new(&a, t, k), MatRef::new(&b, n, k), MatMut::new(&mut c, t, n), false);
        times.push(start.elapsed().as_secs_f64());
    }
    2.0 * (t * n * k) as f64 / median(&mut times)
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

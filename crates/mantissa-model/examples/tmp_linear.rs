use mantissa_model::Linear; use mantissa_store::convention::*; use mantissa_num::*; use std::time::Instant;
fn main() {
  for (rows, cols) in [(5632usize, 2048usize), (2048,2048), (768,256)] {
    let w: Vec<f32> = (0..rows*cols).map(|i| ((i*7919%1000) as f32/500.0-1.0)).collect();
    let q = |s: &str| Weight::Quantized(quantize(&s.parse().unwrap(), &w, rows, cols, Given::default()).unwrap());
    let bf: Vec<u16> = w.iter().map(|x| (x.to_bits()>>16) as u16).collect();
    for (name, weight) in [("f32", Weight::F32(w.clone())), ("bf16", Weight::Bf16(bf)), ("int4-g128", q("int4-g128")), ("int4-g32-asym", q("int4-g32-asym")), ("int8-channel", q("int8-channel")), ("int8-asym", q("int8-g128-asym")), ("fp8", q("fp8-e4m3-channel")), ("nvfp4", q("nvfp4"))] {
      let l = Linear::new("m", LinearWeight{rows, cols, weight, bias: None, input: None}).unwrap();
      let mut scratch = vec![0.0; Linear::scratch_len(rows, cols)];
      print!("[{rows},{cols}] {name:14}");
      for t in [1usize, 65, 512] {
        let x = vec![0.5; t*cols]; let mut out = vec![0.0; t*rows];
        let mut ts: Vec<f64> = (0..7).map(|_| { let s = Instant::now(); l.forward(&x, &mut out, false, &mut scratch); s.elapsed().as_secs_f64() }).collect();
        ts.sort_by(f64::total_cmp);
        print!("  t={t}: {:.2} ms {:.1} GF/s", ts[2]*1e3, 2.0*(t*rows*cols) as f64/ts[2]/1e9);
      }
      println!();
    }
  }
}

//! A second device, whose memory the host cannot borrow, gives the results of the processor.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::cell::RefCell;
use std::ops::Range;

use mantissa_kernels::NotPositiveDefinite;
use mantissa_kernels::device::{Cpu, Device, Factors, PackedWeight, Product};
use mantissa_kernels::packed::{FloatCode, FloatPanels, Grid, PanelFormat, Panels, ScaleCode};

/// Plain loops over memory that only the device reads.
struct Far;

/// Memory of [`Far`].
#[derive(Debug)]
struct Memory(RefCell<Vec<f32>>);

#[derive(Clone, Copy, Debug)]
struct Place<'a> {
    memory: &'a Memory,
    first: usize,
    len: usize,
}

impl Place<'_> {
    fn read(&self) -> Vec<f32> {
        self.memory.0.borrow()[self.first..][..self.len].to_vec()
    }

    fn write(&self, values: &[f32]) {
        assert_eq!(values.len(), self.len);
        self.memory.0.borrow_mut()[self.first..][..self.len].copy_from_slice(values);
    }
}

/// Dequantized rows.
#[derive(Debug)]
struct Rows(Vec<Vec<f32>>);

impl Device for Far {
    type Buffer = Memory;
    type View<'a> = Place<'a>;
    type ViewMut<'a> = Place<'a>;
    type Weight = Rows;
    type Scratch = ();

    fn upload(&self, values: &[f32]) -> Option<Memory> {
        Some(Memory(RefCell::new(values.to_vec())))
    }

    fn download(&self, values: Place<'_>, out: &mut [f32]) {
        out.copy_from_slice(&values.read());
    }

    fn view<'a>(&self, memory: &'a Memory, first: usize, len: usize) -> Place<'a> {
        Place { memory, first, len }
    }

    fn view_mut<'a>(&self, memory: &'a mut Memory, first: usize, len: usize) -> Place<'a> {
        Place { memory, first, len }
    }

    fn place(&self, weight: PackedWeight) -> Option<Rows> {
        let (rows, cols) = match &weight {
            PackedWeight::Integers(panels) => (panels.rows(), panels.cols()),
            PackedWeight::Floats(panels) => (panels.rows(), panels.cols()),
        };
        let row = |row| {
            let mut out = vec![0.0; cols];
            Cpu::new(1).row(&weight, row, &mut out);
            out
        };
        Some(Rows((0..rows).map(row).collect()))
    }

    fn reads_with(&self, _: &Rows, _: &Rows) -> bool {
        true
    }

    fn row(&self, weight: &Rows, row: usize, out: Place<'_>) {
        out.write(&weight.0[row]);
    }

    fn products<'a>(
        &self,
        jobs: impl Iterator<Item = Product<'a, Self>>,
        inputs: &[Place<'_>],
        cols: usize,
        _: Grid,
        (): &mut (),
    ) {
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        for Product { weight, input, out, accumulate } in jobs {
            let x = inputs[input].read();
            let products = x.chunks_exact(cols).flat_map(|x| weight.0.iter().map(move |row| dot(row, x)));
            let before = out.read();
            let sums = products.zip(before).map(|(y, before)| if accumulate { before + y } else { y });
            out.write(&sums.collect::<Vec<_>>());
        }
    }

    fn add_xtx(&self, x: Place<'_>, cols: usize, rows: Range<usize>, _: Factors, sum: Place<'_>) {
        let mut total = sum.read();
        for x in x.read().chunks_exact(cols) {
            for (i, row) in total.chunks_exact_mut(cols).enumerate().filter(|(i, _)| rows.contains(i)) {
                row.iter_mut().zip(x).for_each(|(sum, value)| *sum += x[i] * value);
            }
        }
        sum.write(&total);
    }

    fn cholesky(&self, a: &mut [f64], n: usize) -> Result<(), NotPositiveDefinite> {
        Cpu::new(1).cholesky(a, n)
    }

    fn invert_lower(&self, l: &mut [f64], n: usize) {
        Cpu::new(1).invert_lower(l, n);
    }
}

const ROWS: usize = 20;
const COLS: usize = 96;
const TOKENS: usize = 3;

fn wave(len: usize, phase: f32) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * 0.37 + phase).sin()).collect()
}

/// Weights of integers and of floats.
fn weights() -> [PackedWeight; 2] {
    let format = PanelFormat {
        bits: 8,
        zero: 0,
        levels: None,
        unit: 32,
        group: 32,
        scales: ScaleCode::F32,
        mins: ScaleCode::Absent,
        factor: 1.0,
    };
    let panels = Panels::pack(format, ROWS, COLS, 1, |row, out| {
        out.scales.fill(0.01 + row as f32 * 1e-3);
        out.codes
            .iter_mut()
            .take(COLS)
            .enumerate()
            .for_each(|(i, code)| *code = ((row * 7 + i * 13) % 100) as u8);
    });
    let bytes: Vec<u8> = wave(ROWS * COLS, 0.1).into_iter().flat_map(f32::to_le_bytes).collect();
    let floats = FloatPanels::new(FloatCode::F32, (ROWS, COLS), &bytes, usize::MAX, &[1.0; ROWS], 1);
    [PackedWeight::Integers(panels.unwrap()), PackedWeight::Floats(floats.unwrap())]
}

/// Rows, products and `XᵀX` on a device, each downloaded.
fn results<D: Device>(device: &D) -> Vec<Vec<f32>> {
    let input = device.upload(&wave(TOKENS * COLS, 0.5)).unwrap();
    let x = device.view(&input, 0, TOKENS * COLS);
    let mut all = Vec::new();
    let mut keep = |values: D::View<'_>, len: usize| {
        let mut out = vec![0.0; len];
        device.download(values, &mut out);
        all.push(out);
    };
    for weight in weights() {
        let weight = device.place(weight).unwrap();
        assert!(device.reads_with(&weight, &weight));
        let mut row = device.upload(&[0.0; COLS]).unwrap();
        device.row(&weight, 5, device.view_mut(&mut row, 0, COLS));
        keep(device.view(&row, 0, COLS), COLS);
        let mut outs: Vec<_> = (0..3).map(|_| device.upload(&[1.0; TOKENS * ROWS]).unwrap()).collect();
        // The first two read all tokens, the third only the last.
        let inputs = [x, device.view(&input, (TOKENS - 1) * COLS, COLS)];
        let which = [(0, false, TOKENS), (0, true, TOKENS), (1, false, 1)];
        let jobs = outs.iter_mut().zip(which).map(|(out, (input, accumulate, tokens))| Product {
            weight: &weight,
            input,
            out: device.view_mut(out, 0, tokens * ROWS),
            accumulate,
        });
        device.products(jobs, &inputs, COLS, Grid::BLOCKS, &mut D::Scratch::default());
        outs.iter().for_each(|out| keep(device.view(out, 0, TOKENS * ROWS), TOKENS * ROWS));
    }
    let mut sum = device.upload(&[0.0; COLS * COLS]).unwrap();
    device.add_xtx(x, COLS, 0..COLS, Factors::F32, device.view_mut(&mut sum, 0, COLS * COLS));
    let mut upper = vec![0.0; COLS * COLS];
    device.download(device.view(&sum, 0, COLS * COLS), &mut upper);
    (0..COLS).for_each(|i| upper[i * COLS..][..i].fill(0.0));
    all.push(upper);
    all
}

#[test]
fn a_device_with_memory_of_its_own_gives_the_results_of_the_processor() {
    let norm = |x: &[f32]| x.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
    for (i, (found, expected)) in results(&Far).iter().zip(results(&Cpu::new(2))).enumerate() {
        let error: Vec<f32> = found.iter().zip(&expected).map(|(a, b)| a - b).collect();
        // Only the processor quantizes inputs.
        assert!(norm(&error) < 0.02 * norm(&expected), "result {i}: {}", norm(&error) / norm(&expected));
    }
}

#[test]
fn factors_invert_a_matrix() {
    let device = Cpu::new(2);
    let mut a = vec![4.0, 0.0, 2.0, 5.0];
    device.cholesky(&mut a, 2).unwrap();
    assert_eq!(a, [2.0, 0.0, 1.0, 2.0]);
    device.invert_lower(&mut a, 2);
    assert_eq!(a, [0.5, 0.0, -0.25, 0.5]);
    assert!(device.cholesky(&mut [-1.0], 1).is_err());
}

//! Fine-tuning with adapters over a frozen base.
//!
//! * LoRA (Hu et al. 2021, arXiv:2106.09685, section 4.1): `y = W x + s B A x` with W `[out, in]` frozen, A `[rank, in]`,
//!   B `[out, rank]`, `s = alpha / rank`; rsLoRA (Kalajdzievski 2023, arXiv:2312.03732): `s = alpha / √rank`.
//! * DoRA (Liu et al. 2024, arXiv:2402.09353, eq. 5): `y = m ∘ (W + s B A) x / ‖W + s B A‖`, norms per output row, not
//!   differentiated (section 4.3).
//! * QLoRA (Dettmers et al. 2023, arXiv:2305.14314): LoRA over a base in 4 bits. Any weight scheme will do; the base
//!   is dequantized one linear layer at a time to the compute dtype.
//! * LoftQ (Li et al. 2023, arXiv:2310.08659, algorithm 1): initializes base and adapter so that together they are
//!   nearest to the source's weights.
//!
//! Only the adapters and the tensors named in [`Tuning::train`](crate::Tuning::train) have gradients and optimizer state.

mod init;
mod load;
mod merge;
mod op;
mod svd;
mod work;

pub(crate) use op::Adapted;
pub(crate) use work::{AdapterSizes, AdapterWork, Dropout, Slot};

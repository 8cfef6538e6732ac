//! Activation functions of MLPs: their names in config.json, and the numbers that each layer has for some. Their arithmetic is in
//! `generic/activation.rs`.

use std::fmt;

/// Activation function of the MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// `max(x, 0)²`.
    Relu2,
    /// GELU with the tanh approximation.
    GeluTanh,
    /// GELU with the error function.
    Gelu,
    /// xIELU, with parameters for each layer: `α x² + β x` above 0, `α (exp(x) - 1 - x) + β x` below (Huang 2024, arXiv
    /// 2411.13010).
    Xielu,
}

/// Number of an activation that each layer has, as a checkpoint names and stores it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActivationParameter {
    /// Name.
    pub name: &'static str,
    /// Value before training.
    pub initial: f64,
    /// True if the stored number is the value before softplus.
    pub softplus: bool,
    /// True if it is learned, and stored as a vector; false for a constant, stored as a scalar.
    pub learned: bool,
}

impl ActivationParameter {
    /// Stored number before training.
    pub fn stored(&self) -> f32 {
        if self.softplus { self.initial.exp_m1().ln() as f32 } else { self.initial as f32 }
    }

    /// Shape in a checkpoint.
    pub fn shape(&self) -> Vec<usize> {
        if self.learned { vec![1] } else { Vec::new() }
    }
}

/// Parameters of xIELU: the factor of the square above 0; the factor below 0, to which β is added; the slope at 0, β; and the
/// greatest argument of the exponential, just below 0. Values before training are the paper's.
const XIELU: [ActivationParameter; 4] = [
    ActivationParameter { name: "alpha_p", initial: 0.8, softplus: true, learned: true },
    ActivationParameter { name: "alpha_n", initial: 0.8 - 0.5, softplus: true, learned: true },
    ActivationParameter { name: "beta", initial: 0.5, softplus: false, learned: false },
    ActivationParameter { name: "eps", initial: -1e-6, softplus: false, learned: false },
];

impl Activation {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Silu, Self::Relu2, Self::GeluTanh, Self::Gelu, Self::Xielu];

    /// Numbers that each layer has for it, at most four, in the order in which kernels take them.
    pub const fn parameters(self) -> &'static [ActivationParameter] {
        match self {
            Activation::Xielu => &XIELU,
            _ => &[],
        }
    }

    /// Finds the function that this name stands for in config.json.
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "silu" | "swish" => Activation::Silu,
            "relu2" => Activation::Relu2,
            "gelu_pytorch_tanh" | "gelu_new" => Activation::GeluTanh,
            "gelu" => Activation::Gelu,
            "xielu" => Activation::Xielu,
            _ => return None,
        })
    }
}

impl fmt::Display for Activation {
    /// Prints the name used in config.json.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Activation::Silu => "silu",
            Activation::Relu2 => "relu2",
            Activation::GeluTanh => "gelu_pytorch_tanh",
            Activation::Gelu => "gelu",
            Activation::Xielu => "xielu",
        })
    }
}

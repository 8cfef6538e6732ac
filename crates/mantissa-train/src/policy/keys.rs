//! Keys of policies as TOML tables. Each is declared once: name, type, default, accepted values and meaning.

use mantissa_options::{
    Accepts, AtLeast, Faults, Flag, Note, OneOf, Subkeys, Subtable, Text, Unset, Value, Within, Written,
    options,
};

use super::Master;
use super::operands::{OperandSource, ScaleChoice, Signs};
use crate::scaling::{SCALING_OPTIONS, ScalingOptions};
use crate::store::Precision;

/// Names of the storage dtypes.
pub(super) const DTYPES: [(&str, Precision); 3] =
    [("f32", Precision::F32), ("bf16", Precision::Bf16), ("f16", Precision::F16)];

/// Choices of block scales by name.
pub(super) const SCALES: [(&str, ScaleChoice); 5] = [
    ("rule", ScaleChoice::Rule),
    ("power-of-two", ScaleChoice::PowerOfTwo),
    ("deviation", ScaleChoice::Deviation),
    ("eden", ScaleChoice::Eden),
    ("learned", ScaleChoice::Learned),
];

/// Signs of a rotation by name.
pub(super) const SIGNS: [(&str, Signs); 3] =
    [("plain", Signs::Plain), ("te", Signs::TransformerEngine), ("step", Signs::Step)];

/// Names of the dtypes of gradients.
const GRADIENT_DTYPES: [(&str, Precision); 2] = [DTYPES[0], DTYPES[1]];

/// Master copies by name; the run has the seed.
const MASTERS: [(&str, Master); 5] = [
    ("none", Master::None),
    ("stochastic", Master::Stochastic { seed: 0 }),
    ("int8", Master::Int8 { seed: 0 }),
    ("f32", Master::F32),
    ("remainder", Master::Remainder),
];

/// Roundings by name, true for the stochastic one.
const ROUNDINGS: [(&str, bool); 2] = [("nearest", false), ("stochastic", true)];

/// Values that are rounded, by name.
const SOURCES: [(&str, OperandSource); 2] =
    [("exact", OperandSource::Exact), ("forward", OperandSource::Forward)];

options! {
    /// `[precision]` of a run.
    #[derive(Clone, Debug, PartialEq)]
    pub struct PolicyTable {
        /// fp32 fp16 bf16 … nvfp4; `mantissa train --show-policy nvfp4` prints one
        policy: String = "fp32".to_owned(), Text;
        /// rule of fp16's loss scale: pytorch (the default) or megatron
        scaling: Option<ScalingOptions>, Unset(OneOf(&SCALING_OPTIONS)), Note::example("\"megatron\"");
        /// dtype of the weights
        weights: Option<Precision>, Unset(OneOf(&DTYPES)), Note::HIDDEN;
        /// what the weights lack: stochastic, updates rounded stochastically into bf16 weights; int8, codes of linear weights
        /// under an f32 scale per row, with weights = "f32" for the others; remainder, the low half of f32
        master: Option<Master>, Unset(OneOf(&MASTERS)), Note::HIDDEN;
        /// dtype of the gradients
        gradients: Option<Precision>, Unset(OneOf(&GRADIENT_DTYPES)), Note::HIDDEN;
        /// dtype of the head's weights and inputs
        head: Option<Precision>, Unset(OneOf(&DTYPES)), Note::HIDDEN;
        /// KV cache policy, as which attention reads keys and values; gradients pass the rounding unchanged
        kv: Option<String>, Unset(Text), Note::HIDDEN;
        /// operands of the forward product
        fprop: Option<FpropTable>, Unset(Subtable("")), Note::HIDDEN;
        /// operands of the product that gives the gradient of the inputs
        dgrad: Option<DgradTable>, Unset(Subtable("")), Note::HIDDEN;
        /// operands of the product that gives the gradient of the weights
        wgrad: Option<WgradTable>, Unset(Subtable("")), Note::HIDDEN;
        /// layers at the ends that are not quantized
        keep: Option<KeepTable>, Unset(Subtable("")), Note::HIDDEN;
    }
}

macro_rules! gemm_table {
    ($(#[doc = $doc:literal])* $name:ident, $left:ident, $right:ident) => {
        options! {
            $(#[doc = $doc])*
            #[derive(Clone, Debug, PartialEq)]
            pub struct $name {
                /// left operand
                $left: Option<OperandTable>, Unset(Operand);
                /// right operand
                $right: Option<OperandTable>, Unset(Operand);
                /// rotation of both operands along the contraction axis, in whole runs
                hadamard: Option<RotationTable>, Unset(Subtable(""));
                /// accumulator of sums: f32; emulated for floats of at most 8 bits: hopper, hopper-128, 14-bit, 14-bit-128
                accumulator: Option<String>, Unset(Text);
            }
        }
    };
}

gemm_table!(
    /// `[precision.fprop]`.
    FpropTable, x, w
);
gemm_table!(
    /// `[precision.dgrad]`.
    DgradTable, dy, w
);
gemm_table!(
    /// `[precision.wgrad]`.
    WgradTable, dy, x
);

options! {
    /// Operand: a scheme, or a table with one.
    #[derive(Clone, Debug, PartialEq)]
    pub struct OperandTable {
        /// scheme of the values
        scheme: String, Text, Note::needed("\"nvfp4\"");
        /// rounding
        round: Option<bool>, Unset(OneOf(&ROUNDINGS));
        /// choice of its scales
        scales: Option<ScaleChoice>, Unset(OneOf(&SCALES));
        /// what is rounded: exact, the values; forward, those that the forward's matmul saw
        source: Option<OperandSource>, Unset(OneOf(&SOURCES));
        /// factor by which scales exceed the rule's, so that stochastic rounding clips nothing; below 1 with eden only
        headroom: Option<f32>, Unset(Within(0.5, 16.0));
        /// true, of fprop only: values whose magnitude under the scale reaches the largest element get no gradient
        mask: Option<bool>, Unset(Flag);
    }
}

/// Schemes, and tables with one.
struct Operand;

/// Tables of operands.
const OPERAND: Subtable = Subtable("");

impl Accepts<OperandTable> for Operand {
    fn read(&self, value: &Value) -> Option<OperandTable> {
        match value.as_str() {
            Some(scheme) => Some(OperandTable { scheme: scheme.to_owned(), ..OperandTable::default() }),
            None => OPERAND.read(value),
        }
    }

    fn print(&self, table: &OperandTable) -> Option<Value> {
        OPERAND.print(table)
    }

    fn allowed(&self) -> String {
        "a scheme such as \"nvfp4:te\", or a table { scheme, round, scales, source, headroom, mask }"
            .to_owned()
    }

    fn take(&self, value: &Value, key: &str, faults: &mut Faults) -> Option<OperandTable> {
        if value.is_table() {
            return OPERAND.take(value, key, faults);
        }
        let read = self.read(value);
        if read.is_none() {
            faults.refuse(key, self.refusal(value));
        }
        read
    }

    fn write(&self, table: &OperandTable) -> Option<Written> {
        OPERAND.write(table)
    }

    fn subkeys(&self) -> Option<Subkeys> {
        Accepts::<OperandTable>::subkeys(&OPERAND)
    }
}

options! {
    /// `hadamard` of a matmul.
    #[derive(Clone, Debug, PartialEq)]
    pub struct RotationTable {
        /// power of two; 1: no rotation
        order: usize, AtLeast(1), Note::needed("16");
        /// signs: plain, none; te, the fixed 16 of Transformer Engine; step, new in each step
        signs: Signs = Signs::Plain, OneOf(&SIGNS);
    }
}

options! {
    /// `keep`: layers at the ends that are not quantized.
    #[derive(Clone, Debug, PartialEq)]
    pub struct KeepTable {
        /// share of the layers at the start, rounded to whole ones
        first: f64 = 0.0, Within(0.0, 1.0);
        /// share of the layers at the end
        last: f64 = 0.0, Within(0.0, 1.0);
        /// dtype of their linear layers
        dtype: Precision = Precision::Bf16, OneOf(&DTYPES);
    }
}
